// Memory for packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

// Bytes that do not change any more, and begin at a multiple of a cache line. Equal ones, as those of
// two graphs over the same weights, are in memory once. All weights of a process share large pages
// where the system has them: with small ones, every panel would begin with the walk to its page.
class PackedBytes {
 public:
  PackedBytes() = default;
  // Packs panels of `stride` bytes: `pack(bytes, begin, end)` writes those from `begin` to before `end`
  // into zeros, of which the panel 0 is at `bytes`. Several threads call it, each for panels of its own.
  PackedBytes(size_t stride, size_t num_panels, size_t num_threads,
              const std::function<void(uint8_t*, size_t, size_t)>& pack);

  const uint8_t* data() const;

  // Bytes in memory, and by how many they are held.
  struct Held;

 private:
  struct Release {
    void operator()(Held* held) const;
  };
  std::unique_ptr<Held, Release> held_{};
};
