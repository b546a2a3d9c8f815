// Softmax attention over a cache of int8: scores and values are sums of integers.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "products.h"
#include "softmax.h"

namespace {

// The headers of count tokens: their factors, and their corrections unless these are null.
inline void read_headers(const int8_t* tokens, size_t token_bytes, size_t count, float* factors,
                         int32_t* corrections) {
  size_t i = 0;
#if defined(__AVX512VNNI__)
  const __m512i lanes =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i offsets =
      _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(token_bytes)));
  for (; i + 16 <= count; i += 16) {
    const int8_t* header = tokens + i * token_bytes;
    store(factors + i, _mm512_i32gather_ps(offsets, header, 1));
    if (corrections == nullptr) continue;
    header += offsetof(Int8Header, correction);
    store_sums(corrections + i, _mm512_i32gather_epi32(offsets, header, 1));
  }
#endif
  for (; i < count; ++i) {
    Int8Header header;
    std::memcpy(&header, tokens + i * token_bytes, sizeof(header));
    factors[i] = header.factor;
    if (corrections != nullptr) corrections[i] = header.correction;
  }
}

// The values of this many tokens, at most 127, times weights of 15 bits: their sum fits 32 bits.
constexpr size_t kValueBlock = 512;
constexpr float kMostWeight = 32767.0f;
static_assert(kValueBlock * 32767 * 127 <= INT32_MAX && kValueBlock % kKeyBlock == 0);

// Rounds weights times their values' factors to integers, in steps of the largest; returns a step.
float quantize_weights(const float* weights, const float* factors, size_t size, int16_t* out) {
  Floats peaks = splat(0.0f);
  for (size_t i = 0; i < size; i += kWidth) {
    peaks = max(mul(load(weights + i), load(factors + i)), peaks);
  }
  const float peak = largest_lane(peaks);
  const bool zero = peak < kLeastPeak;
  const Floats inverse = splat(zero ? 0.0f : kMostWeight / peak);
  for (size_t i = 0; i < size; i += kWidth) {
    const Floats weight = mul(load(weights + i), load(factors + i));
    // What is not a number is zero: the sum of the weights is none, either.
    store_integers(out + i, max(mul(weight, inverse), splat(0.0f)));
  }
  return zero ? 0.0f : peak / kMostWeight;
}

#if defined(__AVX512VNNI__)
constexpr size_t kPairRows = 8, kPairVectors = 2;
#elif defined(__AVX2__)
constexpr size_t kPairRows = 4, kPairVectors = 2;
#elif defined(NEON)
constexpr size_t kPairRows = 4, kPairVectors = 4;
#else
constexpr size_t kPairRows = 1, kPairVectors = 16;
#endif

// Adds sums [num_rows][num_columns] times the rows' steps to the results, from a column on.
void add_sums_to(const int32_t* sums, size_t num_rows, size_t num_columns, const float* steps,
                 float* const* out, size_t column) {
  for (size_t r = 0; r < num_rows; ++r) {
    for (size_t i = 0; i < num_columns; i += kWidth, sums += kWidth) {
      float* place = out[r] + column + i;
      store(place, add(load(place), mul(to_floats(load_sums(sums)), splat(steps[r]))));
    }
  }
}

// Adds the products of a pair of tokens' values and kRows pairs of weights.
template <size_t kRows, size_t kVectors>
inline void add_pair(const int16_t* weights, const int8_t* first, const int8_t* second,
                     Sums (&sums)[kRows][kVectors]) {
  Pairs columns[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) {
    columns[v] = load_pairs(first + v * kWidth, second + v * kWidth);
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    const Pairs pair = splat_pair(weights + r * kValueBlock);
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = add_pair_products(sums[r][v], pair, columns[v]);
    }
  }
}

// Adds the values of a block's tokens, [length][value_stride], times kRows rows of weights, each
// [kValueBlock], to kVectors vectors of columns. Zeros follow the weights if their number is odd.
template <size_t kRows, size_t kVectors>
void add_values_tile(const int16_t* weights, const int8_t* values, size_t value_stride,
                     size_t length, const float* steps, float* const* out, size_t column) {
  Sums sums[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = zero_sums();
  }
  values += column;
  size_t i = 0;
  for (; i + 2 <= length; i += 2, values += 2 * value_stride) {
    add_pair(weights + i, values, values + value_stride, sums);
  }
  if (i < length) add_pair(weights + i, values, values, sums);
  // As in multiply_tile: loops over registers end here.
  int32_t results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store_sums(results[r] + v * kWidth, sums[r][v]);
  }
  add_sums_to(results[0], kRows, kVectors * kWidth, steps, out, column);
}

template <size_t kRows>
void add_values(size_t num_rows, const int16_t* weights, const int8_t* values, size_t value_stride,
                size_t length, const float* steps, float* const* out, size_t num_columns) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_values<kRows - 1>(num_rows, weights, values, value_stride, length, steps, out,
                                   num_columns);
    }
  }
  size_t column = 0;
  for (; column + kPairVectors * kWidth <= num_columns; column += kPairVectors * kWidth) {
    add_values_tile<kRows, kPairVectors>(weights, values, value_stride, length, steps, out, column);
  }
  for (; column < num_columns; column += kWidth) {
    add_values_tile<kRows, 1>(weights, values, value_stride, length, steps, out, column);
  }
}

// Softens the scores of all rows, [num_rows][score_stride], and adds up the values by them.
void weigh_int8(const Queries& queries, float* scores, const int8_t* values, size_t value_stride,
                const float* value_factors) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float inverse_sums[kPairRows], steps[kPairRows];
  float* out[kPairRows];
  int16_t weights[kPairRows * kValueBlock];
  for (size_t row = 0; row < queries.num_rows; row += kPairRows) {
    const size_t some = queries.num_rows - row < kPairRows ? queries.num_rows - row : kPairRows;
    for (size_t r = 0; r < some; ++r) {
      const size_t token = (row + r) / queries.group, head = (row + r) % queries.group;
      inverse_sums[r] = soften(scores + (row + r) * stride, queries.length(row + r), stride);
      out[r] = queries.out + token * queries.out_stride + head * size;
      std::memset(out[r], 0, size * sizeof(float));
    }
    const size_t longest = queries.length(row + some - 1);
    for (size_t start = 0; start < longest; start += kValueBlock) {
      const size_t padded = stride - start < kValueBlock ? stride - start : kValueBlock;
      for (size_t r = 0; r < some; ++r) {
        const float step = quantize_weights(scores + (row + r) * stride + start,
                                            value_factors + start, padded, weights + r * kValueBlock);
        steps[r] = inverse_sums[r] * step;
      }
      const size_t length = longest - start < kValueBlock ? longest - start : kValueBlock;
      add_values<kPairRows>(some, weights, values + start * value_stride, value_stride, length,
                            steps, out, size);
    }
  }
}

void attend_int8(const Queries& queries, const Int8Head& head, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  const size_t token_bytes = sizeof(Int8Header) + size, longest = queries.longest();
  float* transposed = scratch + queries.num_rows * stride;
  for (size_t start = 0; start < longest; start += kKeyPanel) {
    const size_t count = longest - start < kKeyPanel ? longest - start : kKeyPanel;
    const int8_t* tokens = head.keys + start * token_bytes;
    transpose<kKeyPanel>(tokens + sizeof(Int8Header), token_bytes, count, size / kQuad, transposed);
    float factors[kKeyPanel] = {};
    int32_t corrections[kKeyPanel] = {};
    read_headers(tokens, token_bytes, count, factors, corrections);
    const Panel panel = {reinterpret_cast<const int8_t*>(transposed), size / kQuad, factors,
                         corrections, nullptr};
    // The rows before see none of these keys.
    const size_t first =
        start < queries.first_length ? 0 : (start - queries.first_length + 1) * queries.group;
    multiply<kKeyPanel>(head.rows + first * size, queries.num_rows - first, panel,
                        head.factors + first, {scratch + first * stride + start, stride, kKeyPanel});
  }
  float* value_factors = transposed + size * kKeyBlock;
  read_headers(head.values, token_bytes, longest, value_factors, nullptr);
  std::memset(value_factors + longest, 0, (stride - longest) * sizeof(float));
  weigh_int8(queries, scratch, head.values + sizeof(Int8Header), token_bytes, value_factors);
}

}  // namespace
