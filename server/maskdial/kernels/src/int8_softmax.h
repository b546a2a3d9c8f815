// Softmax attention over a cache of int8: scores and values are sums of integers.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "pairs.h"
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

// The values of pairs of tokens, [num_tokens][stride]. The last one's weight is zero if it is alone.
struct Int8Values {
  const int8_t* values;
  size_t stride, num_tokens;

  Pairs at(size_t pair, size_t column) const {
    const int8_t* first = values + 2 * pair * stride + column;
    return load_pairs(first, 2 * pair + 1 < num_tokens ? first + stride : first);
  }
};

// Softens the scores of all rows, [num_rows][score_stride], and adds up the values by them.
void weigh_int8(const Queries& queries, float* scores, const int8_t* values, size_t value_stride,
                const float* value_factors) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float inverse_sums[kPairRows];
  float* out[kPairRows];
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
      const size_t length = longest - start < kValueBlock ? longest - start : kValueBlock;
      add_values<kValueBlock>(some, scores + row * stride + start, stride, value_factors + start,
                              length, inverse_sums, kMostWeight,
                              Int8Values{values + start * value_stride, value_stride, length}, out,
                              size);
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
