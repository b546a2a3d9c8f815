// Memory for the floats of a task.
#pragma once

#include <cstddef>
#include <vector>

// At least size floats, aligned to a line of the cache. They are the thread's and stay allocated: a
// decode step would allocate them for microseconds of work. A task of another operator may get the same.
inline float* thread_scratch(size_t size) {
  struct alignas(64) Line {
    float floats[16];
  };
  static thread_local std::vector<Line> lines;
  const size_t num_lines = size / 16 + 1;
  if (lines.size() < num_lines) lines.resize(num_lines);
  return lines[0].floats;
}
