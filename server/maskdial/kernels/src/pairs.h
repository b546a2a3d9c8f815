// Products of 16-bit integers, two of which are added at once.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "quantization.h"
#include "vectors.h"

namespace {

// Rows whose numbers are all smaller are zero: the inverse of a step must be finite.
constexpr float kMinMagnitude = 1e-30f;

#if defined(__AVX512VNNI__)
constexpr size_t kPairRows = 8, kPairVectors = 2;
#elif defined(__AVX2__)
constexpr size_t kPairRows = 4, kPairVectors = 2;
#elif defined(NEON)
constexpr size_t kPairRows = 4, kPairVectors = 4;
#else
constexpr size_t kPairRows = 1, kPairVectors = 16;
#endif

// Rounds whole vectors of numbers to integers from `min_integer` to `max_integer`, the largest magnitude
// to max_integer; returns a step. NaN becomes the minimum.
template <typename Load>
float quantize_to_pairs(size_t size, float min_integer, float max_integer, int16_t* out,
                        Load load_vector) {
  Floats peaks = splat(0.0f);
  for (size_t i = 0; i < size; i += kWidth) peaks = max(magnitude(load_vector(i)), peaks);
  const float peak = largest_lane(peaks);
  const bool zero = peak < kMinMagnitude;
  const Floats inverse = splat(zero ? 0.0f : max_integer / peak);
  for (size_t i = 0; i < size; i += kWidth) {
    store_integers(out + i, max(mul(load_vector(i), inverse), splat(min_integer)));
  }
  return zero ? 0.0f : peak / max_integer;
}

// The same for a head of floats.
float quantize_head_int16(const float* head, size_t head_size, float max_integer, int16_t* out) {
  return quantize_to_pairs(head_size, -max_integer, max_integer, out,
                           [&](size_t i) { return load(head + i); });
}

// Pairs as they are in memory, [num_pairs][stride][2].
struct PackedPairs {
  const int16_t* pairs;
  size_t stride;

  Pairs at(size_t pair, size_t column) const {
    return load_pairs(pairs + 2 * (pair * stride + column));
  }
};

// kRows rows of integers, [left_stride] each, times kVectors vectors of columns of pairs, from a
// column on; finish(row, column, sums) gets vectors of sums as floats. With each pair, some lines of
// `next` are prefetched. Inlined, GCC 12 moves each sum to another register in every step.
template <size_t kRows, size_t kVectors, typename Right, typename Finish>
__attribute__((noinline)) void multiply_pairs_tile(const int16_t* left, size_t left_stride, const Right& right,
                         size_t num_pairs, size_t column, Prefetch& next, size_t num_lines,
                         const Finish& finish) {
  Sums sums[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = zero_sums();
  }
  for (size_t i = 0; i < num_pairs; ++i) {
    fetch(next, num_lines);
    Pairs columns[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) columns[v] = right.at(i, column + v * kWidth);
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      const Pairs pair = splat_pair(left + r * left_stride + 2 * i);
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = add_pair_products(sums[r][v], pair, columns[v]);
      }
    }
  }
  // As in multiply_tile: loops over registers end here.
  int32_t results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store_sums(results[r] + v * kWidth, sums[r][v]);
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kVectors; ++v) {
      finish(r, column + v * kWidth, to_floats(load_sums(results[r] + v * kWidth)));
    }
  }
}

// The same for up to kRows rows and all columns, of which there are whole vectors.
template <size_t kRows, typename Right, typename Finish>
void multiply_pairs(size_t num_rows, const int16_t* left, size_t left_stride, const Right& right,
                    size_t num_pairs, size_t num_columns, Prefetch next, const Finish& finish) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_pairs<kRows - 1>(num_rows, left, left_stride, right, num_pairs, num_columns,
                                       next, finish);
    }
  }
  constexpr size_t kColumns = kPairVectors * kWidth;
  const size_t num_steps = num_columns / kColumns * num_pairs;
  const size_t num_lines = next.lines_each(num_steps);
  size_t column = 0;
  for (; column + kColumns <= num_columns; column += kColumns) {
    multiply_pairs_tile<kRows, kPairVectors>(left, left_stride, right, num_pairs, column, next,
                                             num_lines, finish);
  }
  for (; column < num_columns; column += kWidth) {
    multiply_pairs_tile<kRows, 1>(left, left_stride, right, num_pairs, column, next, num_lines,
                                  finish);
  }
}

// The weights of some tokens are multiplied by their values' factors and rounded to positive integers
// up to `max_weight`; then [num_rows][kBlock] of them are multiplied by the tokens' values, and added to
// the rows' results. scores [num_rows][stride] are exponentials already.
template <size_t kBlock, typename Right>
void add_values(size_t num_rows, const float* scores, size_t stride, const float* factors,
                size_t num_tokens, const float* inverse_sums, float max_weight, const Right& values,
                const Prefetch& next, float* const* out, size_t size) {
  int16_t weights[kPairRows * kBlock];
  float steps[kPairRows];
  const size_t padded = (num_tokens + kLanes - 1) / kLanes * kLanes;
  for (size_t r = 0; r < num_rows; ++r) {
    const float* row = scores + r * stride;
    steps[r] = inverse_sums[r] *
               quantize_to_pairs(padded, 0.0f, max_weight, weights + r * kBlock, [&](size_t i) {
                 return mul(load(row + i), load(factors + i));
               });
  }
  multiply_pairs<kPairRows>(num_rows, weights, kBlock, values, (num_tokens + 1) / 2, size, next,
                            [&](size_t r, size_t column, Floats sum) {
                              float* place = out[r] + column;
                              store(place, add(load(place), mul(sum, splat(steps[r]))));
                            });
}

}  // namespace
