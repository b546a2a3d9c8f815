// Memory for packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

// Zeros, which begin at a multiple of a cache line. All weights of a process share large pages where
// the system has them: with small ones, every panel would begin with the walk to its page.
class PackedBytes {
 public:
  explicit PackedBytes(size_t size);

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }

 private:
  std::shared_ptr<uint8_t> region_;
  uint8_t* data_;
};
