// Softmax attention in which every token of a text sees all others, or those within a window.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "relative.h"
#include "softmax.h"

namespace {

// Copies rows next to each other: those of a whole token are far apart, and too many of them share a
// cache set. Zeros fill each one up to padded_size.
void gather_rows(const float* rows, size_t stride, const float* bias, size_t num_rows, size_t size,
                 size_t padded_size, float* out) {
  for (size_t r = 0; r < num_rows; ++r, rows += stride, out += padded_size) {
    if (bias == nullptr) {
      std::memcpy(out, rows, size * sizeof(float));
    } else {
      for_each_vector(size, [&](size_t i, size_t count) {
        store_some(out + i, add(load_some(rows + i, count), load_some(bias + i, count)), count);
      });
    }
    std::memset(out + size, 0, (padded_size - size) * sizeof(float));
  }
}

void attend_fully(const FullQueries& q, float* scratch) {
  const size_t size = q.padded_size(), stride = q.score_stride();
  float* keys = scratch;  // [padded_length / kKeyBlock][size][kKeyBlock]
  float* values = keys + q.padded_length() * size;
  float* tile = values + q.length * size;  // queries, and then results
  float* scores = tile + kMaxQueries * size;
  const PositionScratch positions(q, scratch + q.scratch_of_content());
  for (size_t start = 0; start < q.length; start += kKeyBlock) {
    const size_t count = q.length - start < kKeyBlock ? q.length - start : kKeyBlock;
    // The values' place holds as many rows, and is not used yet.
    float* rows = q.columns == nullptr ? values : positions.keys + start * size;
    gather_rows(q.keys + start * q.stride, q.stride, q.key_bias, count, q.head_size, size, rows);
    transpose<kKeyBlock>(rows, size * sizeof(float), count, size, keys + start * size);
  }
  gather_rows(q.values, q.stride, q.value_bias, q.length, q.head_size, size, values);
  const FloatPositions by_queries = {positions.keys, size, q.scale,
                                     static_cast<const float*>(q.queries_of_positions.table)};
  const FloatPositions by_keys = {tile, size, q.scale,
                                  static_cast<const float*>(q.keys_of_positions.table)};
  float factors[kFloatRows];
  float* out[kFloatRows];
  for (size_t row = 0, some = 0; row < q.num_queries; row += some) {
    some = tile_rows(q, row, kFloatRows);
    prepare_positions(q, by_queries, row, positions);
    gather_rows(q.queries + row * q.stride, q.stride, q.query_bias, some, q.head_size, size, tile);
    for (size_t r = 0; r < some; ++r) factors[r] = q.scale;
    const size_t begin = q.begin(row) / kKeyBlock * kKeyBlock, end = q.end(row + some - 1);
    for (size_t start = begin; start < end; start += kKeyBlock) {
      const size_t left = end - start < kKeyBlock ? end - start : kKeyBlock;
      for (size_t r = 0; r < some; ++r) out[r] = scores + r * stride + start - begin;
      multiply_floats<kFloatRows>(some, tile, size, keys + start * size, kKeyBlock, size, factors,
                                  out, (left + kLanes - 1) / kLanes * kLanes);
    }
    if (q.columns != nullptr) add_position_scores(q, by_keys, row, some, positions, scores);
    for (size_t r = 0; r < some; ++r) {
      const size_t skipped = q.begin(row + r) - begin, seen = q.end(row + r) - q.begin(row + r);
      std::memset(scores + r * stride, 0, skipped * sizeof(float));
      factors[r] = softmax_row(scores + r * stride + skipped, seen, stride - skipped);
      out[r] = size == q.head_size ? q.out + (row + r) * q.stride : tile + r * size;
    }
    multiply_floats<kFloatRows>(some, scores, stride, values + begin * size, size, end - begin,
                                factors, out, size);
    for (size_t r = 0; r < some && size != q.head_size; ++r) {
      std::memcpy(q.out + (row + r) * q.stride, out[r], q.head_size * sizeof(float));
    }
  }
}

}  // namespace
