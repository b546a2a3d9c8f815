#include "file_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#endif

namespace {

// It takes longer to find the mapping than less memory is worth.
constexpr size_t kLeast = 256 * 1024;

#if defined(__linux__)
// Whether a range is within one mapping of a file.
bool is_mapped_file(uintptr_t begin, uintptr_t end) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  bool found = false;
  char line[512];
  bool whole = true;  // the rest of a long line is a path
  while (!found && std::fgets(line, sizeof(line), maps) != nullptr) {
    uintptr_t first = 0, last = 0;
    unsigned long inode = 0;
    if (whole && std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %lu", &first, &last, &inode) == 3) {
      found = inode != 0 && first <= begin && end <= last;
    }
    whole = false;
    for (const char* at = line; *at != 0; ++at) whole = whole || *at == '\n';
  }
  std::fclose(maps);
  return found;
}
#endif

}  // namespace

void forget_file_pages([[maybe_unused]] const void* data, size_t size) {
  if (size < kLeast) return;
#if defined(__linux__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (start + page - 1) / page * page, end = (start + size) / page * page;
  if (begin >= end || !is_mapped_file(begin, end)) return;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
}
