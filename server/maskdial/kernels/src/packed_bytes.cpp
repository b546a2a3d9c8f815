#include "packed_bytes.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kLine = 64;
constexpr size_t kLargePage = 2 * 1024 * 1024;
// What is not used of a region is no memory, but for less than a page.
constexpr size_t kRegion = 32 * kLargePage;

constexpr size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

std::shared_ptr<uint8_t> new_region(size_t size) {
  void* memory = std::aligned_alloc(kLargePage, size);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  // Without them, it is as much memory in small pages.
  (void)madvise(memory, size, MADV_HUGEPAGE);
#endif
  return {static_cast<uint8_t*>(memory), std::free};
}

// The region that is being filled. It lives as long as something in it does.
struct Filling {
  std::mutex mutex;
  std::weak_ptr<uint8_t> region;
  size_t used = 0;
};

}  // namespace

PackedBytes::PackedBytes(size_t size) {
  static Filling filling;
  const std::lock_guard lock(filling.mutex);
  const size_t room = round_up(size, kLine);
  region_ = filling.region.lock();
  if (room > kRegion) {
    region_ = new_region(round_up(room, kLargePage));
    data_ = region_.get();
  } else {
    if (region_ == nullptr || filling.used + room > kRegion) {
      region_ = new_region(kRegion);
      filling.region = region_;
      filling.used = 0;
    }
    data_ = region_.get() + filling.used;
    filling.used += room;
  }
  std::memset(data_, 0, size);
}
