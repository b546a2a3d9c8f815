// Memory for packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// Bytes that do not change any more, and begin at a multiple of a cache line. Equal ones, as those of
// two graphs over the same weights, are in memory once. All weights of a process share large pages
// where the system has them: with small ones, every panel would begin with the walk to its page.
class PackedBytes {
 public:
  PackedBytes() = default;
  explicit PackedBytes(const std::vector<uint8_t>& bytes);

  const uint8_t* data() const;

  // Bytes in memory, and by how many they are held.
  struct Held;

 private:
  struct Release {
    void operator()(Held* held) const;
  };
  std::unique_ptr<Held, Release> held_{};
};
