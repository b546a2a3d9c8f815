#include "packed_bytes.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kLine = 64;
constexpr size_t kLargePage = 2 * 1024 * 1024;
// The unused end of a region takes no memory, but for less than a page.
constexpr size_t kRegion = 32 * kLargePage;

constexpr size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

// Of packing, in bytes.
constexpr size_t kTask = 512 * 1024;

// Calls task(i) for each i below num_tasks, and throws what one of them threw. A session that is being
// made runs nothing on its own threads.
void on_threads(size_t num_tasks, size_t num_threads, const std::function<void(size_t)>& task) {
  std::atomic<size_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < num_tasks; i = next++) task(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < std::min(num_threads, num_tasks)) others.emplace_back(work);
  } catch (const std::system_error&) {
    // With fewer threads, it takes longer.
  }
  work();
  for (std::thread& each : others) each.join();
  if (error != nullptr) std::rethrow_exception(error);
}

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
  // Writes the bytes in place, and gives the place back if there are equal ones.
  Held* hold(size_t size, const std::function<size_t(uint8_t*)>& write) {
    auto [region, data] = [&] {
      const std::lock_guard lock(mutex_);
      return reserve(size);
    }();
    const size_t hash = write(data);
    const std::lock_guard lock(mutex_);
    const auto [first, last] = held_.equal_range(hash);
    for (auto entry = first; entry != last; ++entry) {
      Held& held = entry->second;
      if (held.size == size && std::equal(data, data + size, held.data)) {
        ++held.num_holders;
        left_.emplace(size, Left{region, data});
        return &held;
      }
    }
    return &held_.emplace(hash, Held{hash, std::move(region), data, size})->second;
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

PackedBytes::PackedBytes(size_t stride, size_t num_panels, size_t num_threads,
                         const std::function<void(uint8_t*, size_t, size_t)>& pack) {
  // Of the shape alone, as the hash is one of the tasks' hashes
  const size_t per_task = std::max<size_t>(1, kTask / stride);
  const size_t num_tasks = (num_panels + per_task - 1) / per_task;
  held_.reset(store().hold(stride * num_panels, [&](uint8_t* bytes) {
    std::vector<size_t> hashes(num_tasks);
    on_threads(num_tasks, num_threads, [&](size_t task) {
      const size_t begin = task * per_task, end = std::min(begin + per_task, num_panels);
      uint8_t* first = bytes + begin * stride;
      const size_t size = (end - begin) * stride;
      std::memset(first, 0, size);
      pack(bytes, begin, end);
      hashes[task] = std::hash<std::string_view>{}({reinterpret_cast<const char*>(first), size});
    });
    size_t hash = 0;
    for (const size_t each : hashes) hash = hash * 31 + each;
    return hash;
  }));
}

const uint8_t* PackedBytes::data() const { return held_->data; }

void PackedBytes::Release::operator()(Held* held) const { store().release(held); }
