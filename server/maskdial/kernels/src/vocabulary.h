#pragma once

#include <cmath>

#include "processor.h"

// A row is summarized in segments of this many scores, which take a thread microseconds, and these are
// joined from the first to the last: bits do not depend on whether one thread does it or several.
constexpr size_t kSegment = 4096;

inline size_t num_segments(size_t size) { return (size + kSegment - 1) / kSegment; }
RowSummary summarize_segment(const Processor& processor, const float* scores, size_t size,
                             size_t segment);
RowSummary join_segments(const RowSummary* segments, size_t count);

// The indices of the k greatest of some scores and of those equal to the k-th, ascending; returns how
// many those are. There is room for all, and 1 <= k <= size.
size_t find_greatest(const Processor& processor, const float* scores, size_t size, size_t k,
                     int64_t* out);
