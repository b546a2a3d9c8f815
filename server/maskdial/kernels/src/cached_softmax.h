// Softmax attention over a cache of int8 or int16: scores and values are sums of integers.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "pairs.h"
#include "products.h"
#include "softmax.h"

namespace {

// One number of 4 bytes of each of count tokens.
template <typename Number>
void read_each(const void* tokens, size_t token_bytes, size_t count, Number* out) {
  static_assert(sizeof(Number) == sizeof(int32_t));
  const auto* bytes = static_cast<const char*>(tokens);
  size_t i = 0;
#if defined(__AVX512VNNI__)
  const __m512i lanes =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i offsets =
      _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(token_bytes)));
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_si512(out + i, _mm512_i32gather_epi32(offsets, bytes + i * token_bytes, 1));
  }
#endif
  for (; i < count; ++i) std::memcpy(out + i, bytes + i * token_bytes, sizeof(Number));
}

// Values are added up, and keys and values prefetched, in blocks of this many tokens: a few lines at a
// time while the block before is multiplied. All at once, they would arrive no sooner, and the processor
// would compute nothing meanwhile.
constexpr size_t kValueBlock = 128;
// The maximum weights: sums fit 32 bits.
constexpr float kMaxInt8Weight = 32767.0f, kMaxInt16Weight = kMaxInt16Value;
static_assert(kSkipStep % kValueBlock == 0 && kSkipStep % kKeyBlock == 0);
static_assert(kValueBlock * 32767 * 127 <= INT32_MAX);
static_assert(kValueBlock * kMaxInt16Value * kMaxInt16Value <= INT32_MAX);

// Tokens as a cache has them, from the first one on.
template <typename Integer>
struct Tokens {
  const Integer* first;
  size_t width, count;

  size_t bytes() const { return width * sizeof(Integer); }

  Prefetch block(size_t start, size_t max_tokens) const {
    if (start >= count) return {};
    const size_t num_tokens = count - start < max_tokens ? count - start : max_tokens;
    return {reinterpret_cast<const uint8_t*>(first + start * width), num_tokens * bytes()};
  }
};

// The values of pairs of tokens, [num_tokens][stride]. The last one's weight is zero if it is alone.
template <typename Integer>
struct CachedValues {
  const Integer* values;
  size_t stride, num_tokens;

  Pairs at(size_t pair, size_t column) const {
    const Integer* first = values + 2 * pair * stride + column;
    return load_pairs(first, 2 * pair + 1 < num_tokens ? first + stride : first);
  }
};

// Softmax of all rows of scores, [num_rows][score_stride], times the values. In each block, the weights
// are rounded to integers up to `max_weight`.
template <typename Integer>
void softmax_times_integer_values(const Queries& queries, float* scores, float max_weight,
                    const Tokens<Integer>& values, float* factors) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  std::memset(factors + values.count, 0, (stride - values.count) * sizeof(float));
  size_t num_read = 0;  // factors
  float inverse_sums[kPairRows];
  float* out[kPairRows];
  for (size_t row = 0; row < queries.num_rows; row += kPairRows) {
    const size_t some = queries.num_rows - row < kPairRows ? queries.num_rows - row : kPairRows;
    softmax_rows(queries, scores, row, some, inverse_sums, out);
    for (size_t r = 0; r < some; ++r) std::memset(out[r], 0, size * sizeof(float));
    const size_t longest = queries.length(row + some - 1);
    const size_t first = queries.begin(row) / kValueBlock * kValueBlock;
    for (size_t start = first; start < longest; start += kValueBlock) {
      Prefetch next;
      if (start >= num_read) {
        const Prefetch block = values.block(start, kValueBlock);
        num_read = start + block.size / values.bytes();
        read_each(block.bytes, values.bytes(), num_read - start, factors + start);
        next = num_read < values.count ? values.block(num_read, kValueBlock) : queries.after;
      }
      const size_t length = longest - start < kValueBlock ? longest - start : kValueBlock;
      const Integer* integers = values.first + start * values.width + values.width - size;
      add_values<kValueBlock>(some, scores + row * stride + start, stride, factors + start, length,
                              inverse_sums, max_weight,
                              CachedValues<Integer>{integers, values.width, length}, next, out,
                              size);
    }
  }
}

void attend_int8(const Queries& queries, const Int8Head& head, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  const size_t width = sizeof(Int8Header) + size, longest = queries.longest();
  const Tokens<int8_t> keys = {head.keys, width, longest}, values = {head.values, width, longest};
  float* transposed = scratch + queries.num_rows * stride;
  for (size_t start = 0; start < longest; start += kKeyPanel) {
    const size_t count = longest - start < kKeyPanel ? longest - start : kKeyPanel;
    const int8_t* tokens = head.keys + start * width;
    transpose<kKeyPanel>(tokens + sizeof(Int8Header), width, count, size / kQuad, transposed);
    float factors[kKeyPanel] = {};
    int32_t corrections[kKeyPanel] = {};
    read_each(tokens, width, count, factors);
    read_each(tokens + offsetof(Int8Header, correction), width, count, corrections);
    const bool last = start + count == longest;
    const Panel panel = {reinterpret_cast<const int8_t*>(transposed),
                         size / kQuad,
                         factors,
                         corrections,
                         nullptr,
                         last ? values.block(0, kValueBlock) : keys.block(start + count, kKeyPanel)};
    // The rows before see none of these keys.
    const size_t first = queries.first_row(start);
    multiply<kKeyPanel>(head.rows + first * size, queries.num_rows - first, panel,
                        head.factors + first, {scratch + first * stride + start, stride, kKeyPanel});
  }
  softmax_times_integer_values(queries, scratch, kMaxInt8Weight, values, transposed + size * kKeyBlock);
}

void attend_int16(const Queries& queries, const Int16Head& head, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  const size_t width = kInt16Header + size, longest = queries.longest();
  const Tokens<int16_t> keys = {head.keys, width, longest}, values = {head.values, width, longest};
  float* transposed = scratch + queries.num_rows * stride;
  for (size_t start = 0; start < longest; start += kKeyBlock) {
    const size_t count = longest - start < kKeyBlock ? longest - start : kKeyBlock;
    const int16_t* tokens = head.keys + start * width;
    transpose<kKeyBlock>(tokens + kInt16Header, keys.bytes(), count, size / 2, transposed);
    float factors[kKeyBlock] = {};
    read_each(tokens, keys.bytes(), count, factors);
    const PackedPairs block = {reinterpret_cast<const int16_t*>(transposed), kKeyBlock};
    const size_t num_columns = (count + kLanes - 1) / kLanes * kLanes;
    const bool last = start + count == longest;
    Prefetch next = last ? values.block(0, kValueBlock) : keys.block(start + count, kKeyBlock);
    // The rows before see none of these keys.
    size_t row = queries.first_row(start);
    for (; row < queries.num_rows; row += kPairRows, next = {}) {
      const size_t some = queries.num_rows - row < kPairRows ? queries.num_rows - row : kPairRows;
      multiply_pairs<kPairRows>(
          some, head.rows + row * size, size, block, size / 2, num_columns, next,
          [&](size_t r, size_t column, Floats sum) {
            store(scratch + (row + r) * stride + start + column,
                  mul(mul(sum, splat(head.factors[row + r])), load(factors + column)));
          });
    }
  }
  softmax_times_integer_values(queries, scratch, kMaxInt16Weight, values, transposed + size * kKeyBlock);
}

}  // namespace
