// Products of one row and an adapter's matrices. The order of the operations is the same on every processor.
//
// Included by processor.cpp only: see vectors.h.
#pragma once

#include "vectors.h"

namespace {

inline Floats load_number(const float* p) { return load(p); }
inline Floats load_number(const uint16_t* p) { return load_halves(p); }

// The scalar products of a row and kRankStep rows of A.
template <typename Number>
inline void reduce_some(const LowRank& matrices, const Number* a, const float* row, float* out) {
  constexpr size_t kVectors = kLanes / kWidth;
  Floats sums[kRankStep][kVectors];
  UNROLL for (size_t r = 0; r < kRankStep; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  const auto add_lanes = [&](const float* numbers, size_t i) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const Floats x = load(numbers + v * kWidth);
      UNROLL for (size_t r = 0; r < kRankStep; ++r) {
        const Number* place = a + r * matrices.a_stride + i + v * kWidth;
        sums[r][v] = fma(x, load_number(place), sums[r][v]);
      }
    }
  };
  size_t i = 0;
  for (; i + kLanes <= matrices.num_inputs; i += kLanes) add_lanes(row + i, i);
  if (i < matrices.num_inputs) {
    float rest[kLanes] = {};
    std::memcpy(rest, row + i, (matrices.num_inputs - i) * sizeof(float));
    add_lanes(rest, i);
  }
  UNROLL for (size_t r = 0; r < kRankStep; ++r) out[r] = sum_of_lanes(sums[r]);
}

template <typename Number>
void reduce_with(const LowRank& matrices, const Number* a, const float* row, float* out) {
  for (size_t r = 0; r < matrices.rank; r += kRankStep) {
    reduce_some(matrices, a + r * matrices.a_stride, row, out + r);
  }
}

void reduce(const LowRank& matrices, const float* row, float* out) {
  if (matrices.halves) return reduce_with(matrices, static_cast<const uint16_t*>(matrices.a), row, out);
  reduce_with(matrices, static_cast<const float*>(matrices.a), row, out);
}

// The sums of kVectors vectors of columns, over the rows of B from the first to the last.
template <size_t kVectors, typename Number>
inline void expand_some(const LowRank& matrices, const Number* b, const float* reduced, float* out) {
  Floats sums[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
  for (size_t r = 0; r < matrices.rank; ++r, b += matrices.b_stride) {
    const Floats factor = splat(reduced[r]);
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = fma(factor, load_number(b + v * kWidth), sums[v]);
    }
  }
  UNROLL for (size_t v = 0; v < kVectors; ++v) store(out + v * kWidth, sums[v]);
}

template <typename Number>
void expand_with(const LowRank& matrices, const Number* b, const float* reduced, size_t num_columns,
                 float* out) {
  constexpr size_t kTogether = 3 * kWidth;
  size_t column = 0;
  for (; column + kTogether <= num_columns; column += kTogether) {
    expand_some<3>(matrices, b + column, reduced, out + column);
  }
  for (; column < num_columns; column += kWidth) {
    expand_some<1>(matrices, b + column, reduced, out + column);
  }
}

void expand(const LowRank& matrices, const float* reduced, size_t column, size_t num_columns,
            float* out) {
  if (matrices.halves) {
    const auto* b = static_cast<const uint16_t*>(matrices.b) + column;
    return expand_with(matrices, b, reduced, num_columns, out);
  }
  expand_with(matrices, static_cast<const float*>(matrices.b) + column, reduced, num_columns, out);
}

}  // namespace
