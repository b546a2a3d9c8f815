#pragma once

#include <cmath>

#include "processor.h"

// The indices of the k greatest of some scores and of those equal to the k-th, ascending; returns how
// many those are. There is room for all, and 1 <= k <= size.
size_t find_greatest(const Processor& processor, const float* scores, size_t size, size_t k,
                     int64_t* out);
