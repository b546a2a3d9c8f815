// Softmax attention in which every token of a text sees all others, by integers of 12 bits.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "full_softmax.h"
#include "pairs.h"

namespace {

// Queries, keys and values; and weights times values' factors, which are positive. Sums over a head,
// and over a block of tokens, fit 32 bits.
constexpr float kMaxElement = 2047.0f, kMaxShare = 4095.0f;
constexpr size_t kShareBlock = 256;
static_assert(kPairRows <= kMaxQueries);
static_assert(kMaxHeadSize * 2047 * 2047 <= INT32_MAX && kShareBlock * 4095 * 2047 <= INT32_MAX);

// Rounds a head, and its bias unless that is null, to integers, followed by zeros up to padded_size.
float quantize_row(const float* row, const float* bias, size_t size, size_t padded_size,
                   int16_t* out) {
  if (size == padded_size && bias == nullptr) {
    return quantize_to_pairs(size, -kMaxElement, kMaxElement, out,
                             [&](size_t i) { return load(row + i); });
  }
  float copy[kMaxHeadSize];
  gather_rows(row, 0, bias, 1, size, padded_size, copy);
  return quantize_to_pairs(padded_size, -kMaxElement, kMaxElement, out,
                           [&](size_t i) { return load(copy + i); });
}

// Rows that are read soon: those of tokens that follow one another are far apart, and processors do not
// prefetch them.
constexpr size_t kRowsAhead = 6;

inline void fetch_row(const float* rows, size_t stride, size_t row, size_t num_rows, size_t size) {
  if (row + kRowsAhead >= num_rows) return;
  const float* ahead = rows + (row + kRowsAhead) * stride;
  for (size_t i = 0; i < size; i += kLine / sizeof(float)) __builtin_prefetch(ahead + i);
}

void attend_fully_int16(const FullQueries& q, float* scratch) {
  const size_t size = q.padded_size(), stride = q.score_stride();
  // Keys [padded_length / kKeyBlock][size / 2][kKeyBlock][2], and a factor for each.
  float* keys = scratch;
  float* key_factors = keys + q.padded_length() * size / 2;
  // Values [(length + 1) / 2][size][2], and a factor for each.
  auto* values = reinterpret_cast<int16_t*>(key_factors + q.padded_length());
  const size_t num_pairs = (q.length + 1) / 2;
  float* value_factors = reinterpret_cast<float*>(values) + num_pairs * size;
  float* tile = value_factors + q.padded_length();  // results
  float* scores = tile + kPairRows * size;
  const PositionScratch positions(q, scratch + q.scratch_of_content());
  int16_t rows[kKeyBlock * kMaxHeadSize];
  for (size_t start = 0; start < q.length; start += kKeyBlock) {
    const size_t count = q.length - start < kKeyBlock ? q.length - start : kKeyBlock;
    auto* its = q.columns == nullptr ? rows : reinterpret_cast<int16_t*>(positions.keys) + start * size;
    for (size_t i = 0; i < count; ++i) {
      fetch_row(q.keys, q.stride, start + i, q.length, q.head_size);
      key_factors[start + i] = q.scale * quantize_row(q.keys + (start + i) * q.stride, q.key_bias,
                                                      q.head_size, size, its + i * size);
    }
    transpose<kKeyBlock>(its, size * sizeof(int16_t), count, size / 2, keys + start * size / 2);
  }
  std::memset(key_factors + q.length, 0, (q.padded_length() - q.length) * sizeof(float));
  std::memset(value_factors + q.length, 0, (q.padded_length() - q.length) * sizeof(float));
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    std::memset(rows + size, 0, size * sizeof(int16_t));
    for (size_t token = 2 * pair; token < 2 * pair + 2 && token < q.length; ++token) {
      fetch_row(q.values, q.stride, token, q.length, q.head_size);
      value_factors[token] = quantize_row(q.values + token * q.stride, q.value_bias, q.head_size,
                                          size, rows + token % 2 * size);
    }
    int16_t* out = values + 2 * pair * size;
    for (size_t i = 0; i < size; ++i) {
      out[2 * i] = rows[i];
      out[2 * i + 1] = rows[size + i];
    }
  }
  float query_factors[kPairRows], scaled_factors[kPairRows], inverse_sums[kPairRows];
  float* out[kPairRows];
  const PairPositions by_queries = {reinterpret_cast<const int16_t*>(positions.keys), size, key_factors,
                                    static_cast<const int16_t*>(q.queries_of_positions.table),
                                    q.queries_of_positions.factors};
  const PairPositions by_keys = {rows, size, scaled_factors,
                                 static_cast<const int16_t*>(q.keys_of_positions.table),
                                 q.keys_of_positions.factors};
  for (size_t row = 0, some = 0; row < q.num_queries; row += some) {
    some = tile_rows(q, row, kPairRows);
    prepare_positions(q, by_queries, row, positions);
    for (size_t r = 0; r < some; ++r) {
      fetch_row(q.queries, q.stride, row + r, q.num_queries, q.head_size);
      query_factors[r] = quantize_row(q.queries + (row + r) * q.stride, q.query_bias, q.head_size,
                                      size, rows + r * size);
    }
    for (size_t start = 0; start < q.length; start += kKeyBlock) {
      const size_t left = q.length - start < kKeyBlock ? q.length - start : kKeyBlock;
      const PackedPairs block = {reinterpret_cast<const int16_t*>(keys + start * size / 2),
                                 kKeyBlock};
      multiply_pairs<kPairRows>(some, rows, size, block, size / 2,
                                (left + kLanes - 1) / kLanes * kLanes, {},
                                [&](size_t r, size_t column, Floats sum) {
                                  const size_t key = start + column;
                                  const Floats factor = load(key_factors + key);
                                  store(scores + r * stride + key,
                                        mul(mul(sum, splat(query_factors[r])), factor));
                                });
    }
    if (q.columns != nullptr) {
      for (size_t r = 0; r < some; ++r) scaled_factors[r] = q.scale * query_factors[r];
      add_position_scores(q, by_keys, row, some, positions, scores);
    }
    for (size_t r = 0; r < some; ++r) {
      inverse_sums[r] = softmax_row(scores + r * stride, q.length, stride);
      out[r] = size == q.head_size ? q.out + (row + r) * q.stride : tile + r * size;
      std::memset(out[r], 0, size * sizeof(float));
    }
    for (size_t start = 0; start < q.length; start += kShareBlock) {
      const size_t left = q.length - start < kShareBlock ? q.length - start : kShareBlock;
      add_values<kShareBlock>(some, scores + start, stride, value_factors + start, left,
                              inverse_sums, kMaxShare, PackedPairs{values + start * size, size},
                              {}, out, size);
    }
    for (size_t r = 0; r < some && size != q.head_size; ++r) {
      std::memcpy(q.out + (row + r) * q.stride, out[r], q.head_size * sizeof(float));
    }
  }
}

}  // namespace
