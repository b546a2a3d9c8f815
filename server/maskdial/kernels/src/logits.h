#pragma once

#include <cmath>

#include "processor.h"

// A row is summarized in segments of this many scores, which take a thread microseconds, and these are
// joined from the first to the last: bits do not depend on whether one thread does it or several.
constexpr size_t kSegment = 4096;

inline size_t num_segments(size_t size) { return (size + kSegment - 1) / kSegment; }
LogitsSummary summarize_segment(const Processor& processor, const float* scores, size_t size,
                             size_t segment);
LogitsSummary merge_segments(const LogitsSummary* segments, size_t count);

// Writes the indices of the k greatest scores and of those equal to the k-th, ascending; returns their
// number. There is room for all, and 1 <= k <= size.
size_t find_greatest(const Processor& processor, const float* scores, size_t size, size_t k,
                     int64_t* out);
