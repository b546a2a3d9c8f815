#include "packed_bytes.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <string_view>
#include <unordered_map>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kLine = 64;
constexpr size_t kLargePage = 2 * 1024 * 1024;
// The unused end of a region takes no memory, but for less than a page.
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

}  // namespace

struct PackedBytes::Held {
  size_t hash;
  std::shared_ptr<uint8_t> region;
  uint8_t* data;
  size_t size;
  size_t num_holders = 1;
};

namespace {

using Held = PackedBytes::Held;

// All packed weights of the process.
class Store {
 public:
  // Finds the bytes, or copies them.
  Held* hold(const std::vector<uint8_t>& bytes) {
    const std::string_view view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const size_t hash = std::hash<std::string_view>{}(view);
    const std::lock_guard lock(mutex_);
    const auto [first, last] = held_.equal_range(hash);
    for (auto entry = first; entry != last; ++entry) {
      Held& held = entry->second;
      if (held.size == bytes.size() && std::equal(bytes.begin(), bytes.end(), held.data)) {
        ++held.num_holders;
        return &held;
      }
    }
    auto [region, data] = reserve(bytes.size());
    std::copy(bytes.begin(), bytes.end(), data);
    return &held_.emplace(hash, Held{hash, std::move(region), data, bytes.size()})->second;
  }

  void release(Held* held) {
    const std::lock_guard lock(mutex_);
    if (--held->num_holders > 0) return;
    left_.emplace(held->size, Left{held->region, held->data});
    const auto [first, last] = held_.equal_range(held->hash);
    held_.erase(std::find_if(first, last, [&](const auto& entry) { return &entry.second == held; }));
  }

 private:
  using Place = std::pair<std::shared_ptr<uint8_t>, uint8_t*>;

  // A place that is free again, as long as its region lives.
  struct Left {
    std::weak_ptr<uint8_t> region;
    uint8_t* data;
  };

  Place reserve(size_t size) {
    // The matrices of a model's next version are as large as those of the last.
    while (const auto left = left_.extract(size)) {
      if (auto region = left.mapped().region.lock()) return {region, left.mapped().data};
    }
    const size_t room = round_up(size, kLine);
    if (room > kRegion) {
      auto region = new_region(round_up(room, kLargePage));
      return {region, region.get()};
    }
    auto region = filling_.lock();
    if (region == nullptr || used_ + room > kRegion) {
      for (auto left = left_.begin(); left != left_.end();) {
        left = left->second.region.expired() ? left_.erase(left) : std::next(left);
      }
      filling_ = region = new_region(kRegion);
      used_ = 0;
    }
    uint8_t* data = region.get() + used_;
    used_ += room;
    return {std::move(region), data};
  }

  std::mutex mutex_;
  std::unordered_multimap<size_t, Held> held_;  // by their hash
  std::unordered_multimap<size_t, Left> left_;  // by their size
  // The region that is being filled. It lives as long as something in it does.
  std::weak_ptr<uint8_t> filling_;
  size_t used_ = 0;
};

Store& store() {
  static Store* const store = new Store;  // sessions may be closed after static objects are
  return *store;
}

}  // namespace

PackedBytes::PackedBytes(const std::vector<uint8_t>& bytes) : held_(store().hold(bytes)) {}

const uint8_t* PackedBytes::data() const { return held_->data; }

void PackedBytes::Release::operator()(Held* held) const { store().release(held); }
