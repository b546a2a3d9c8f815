// Rotated and quantized heads, and softmax attention over them.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "pairs.h"
#include "quantization.h"
#include "vectors.h"

namespace {

void rotate(const float* head, size_t head_size, const float* cosines, const float* sines,
            size_t half, float* out) {
  for_each_vector(half, [&](size_t i, size_t count) {
    const Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
    const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
    store_some(out + i, sub(mul(a, c), mul(b, s)), count);
    store_some(out + half + i, add(mul(b, c), mul(a, s)), count);
  });
  std::memcpy(out + 2 * half, head + 2 * half, (head_size - 2 * half) * sizeof(float));
}

constexpr float kMaxInteger = 127.0f;

float quantize_head(const float* head, size_t head_size, uint8_t* out) {
  const float peak = largest_magnitude(head, head_size);
  const bool zero = peak < kMinMagnitude;
  const Floats inverse = splat(zero ? 0.0f : kMaxInteger / peak);
  for (size_t i = 0; i < head_size; i += kWidth) {
    // NaN becomes the minimum.
    store_bytes(out + i, max(mul(load(head + i), inverse), splat(-kMaxInteger)));
  }
  return zero ? 0.0f : peak / kMaxInteger;
}

void cache_head(const float* head, size_t head_size, int8_t* out) {
  uint8_t integers[kMaxHeadSize];
  Int8Header header{quantize_head(head, head_size, integers), 0};
  int32_t sum = 0;
  for (size_t i = 0; i < head_size; ++i) {
    const auto integer = static_cast<int8_t>(integers[i] ^ 0x80);
    out[sizeof(header) + i] = integer;
    sum += integer;
  }
  header.correction = sum * -128;
  std::memcpy(out, &header, sizeof(header));
}

// The powers of e below this exponent are no floats.
constexpr float kMinExponent = -87.0f;

// e to the power of x <= 0; below the least exponent, as for that. The polynomial is that of Cephes'
// expf, exact to a bit or two.
inline Floats exponential(Floats x) {
  x = max(x, splat(kMinExponent));
  const Floats n = round(mul(x, splat(1.44269504088896341f)));
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return times_power_of_two(p, n);
}

// out[d][i] = rows[i][d] for kBlock rows of 4-byte elements, of which count are there; zeros follow.
// The rows of `out` are `stride` apart.
template <size_t kBlock>
inline __attribute__((always_inline)) void transpose_to(const void* rows, size_t row_bytes,
                                                        size_t count, size_t size, float* out,
                                                        size_t stride) {
  const auto* bytes = static_cast<const char*>(rows);
  size_t i = 0;
#if defined(__AVX2__)
  const auto quad = [&](size_t row, size_t d) {
    return _mm_castsi128_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + row * row_bytes) + d / 4));
  };
#if defined(__AVX512VNNI__)
  // Four squares side by side: a quarter q of a vector has four elements of row i + 4 * q + r.
  const auto quads = [&](size_t row, size_t d) {
    __m512 four = _mm512_castps128_ps512(quad(row, d));
    four = _mm512_insertf32x4(four, quad(row + 4, d), 1);
    four = _mm512_insertf32x4(four, quad(row + 8, d), 2);
    return _mm512_insertf32x4(four, quad(row + 12, d), 3);
  };
  for (; i + 16 <= count; i += 16) {
    for (size_t d = 0; d < size; d += 4) {
      const __m512 a = quads(i, d), b = quads(i + 1, d);
      const __m512 c = quads(i + 2, d), e = quads(i + 3, d);
      const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
      const __m512d ce = _mm512_castps_pd(_mm512_unpacklo_ps(c, e));
      const __m512d ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
      const __m512d ce2 = _mm512_castps_pd(_mm512_unpackhi_ps(c, e));
      float* to = out + d * stride + i;
      store(to, _mm512_castpd_ps(_mm512_unpacklo_pd(ab, ce)));
      store(to + stride, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, ce)));
      store(to + 2 * stride, _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, ce2)));
      store(to + 3 * stride, _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, ce2)));
    }
  }
#endif
  for (; i + 4 <= count; i += 4) {
    for (size_t d = 0; d < size; d += 4) {
      __m128 a = quad(i, d), b = quad(i + 1, d), c = quad(i + 2, d), e = quad(i + 3, d);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      _mm_storeu_ps(out + d * stride + i, a);
      _mm_storeu_ps(out + (d + 1) * stride + i, b);
      _mm_storeu_ps(out + (d + 2) * stride + i, c);
      _mm_storeu_ps(out + (d + 3) * stride + i, e);
    }
  }
#elif defined(NEON)
  const auto quad = [&](size_t row, size_t d) {
    return vreinterpretq_f32_s8(vld1q_s8(
        reinterpret_cast<const int8_t*>(bytes + row * row_bytes + d * sizeof(float))));
  };
  const auto pairs = [](float32x4_t a, float32x4_t b) {
    return vreinterpretq_f64_f32(vtrn1q_f32(a, b));
  };
  const auto pairs2 = [](float32x4_t a, float32x4_t b) {
    return vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  };
  for (; i + 4 <= count; i += 4) {
    for (size_t d = 0; d < size; d += 4) {
      const float32x4_t a = quad(i, d), b = quad(i + 1, d), c = quad(i + 2, d), e = quad(i + 3, d);
      const float64x2_t ab = pairs(a, b), ce = pairs(c, e);
      const float64x2_t ab2 = pairs2(a, b), ce2 = pairs2(c, e);
      float* to = out + d * stride + i;
      store(to, vreinterpretq_f32_f64(vtrn1q_f64(ab, ce)));
      store(to + stride, vreinterpretq_f32_f64(vtrn1q_f64(ab2, ce2)));
      store(to + 2 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab, ce)));
      store(to + 3 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab2, ce2)));
    }
  }
#endif
  for (; i < count; ++i) {
    for (size_t d = 0; d < size; ++d) {
      std::memcpy(out + d * stride + i, bytes + i * row_bytes + d * sizeof(float), sizeof(float));
    }
  }
  for (size_t d = 0; d < size && count < kBlock; ++d) {
    std::memset(out + d * stride + count, 0, (kBlock - count) * sizeof(float));
  }
}

template <size_t kBlock>
void transpose(const void* rows, size_t row_bytes, size_t count, size_t size, float* out) {
  transpose_to<kBlock>(rows, row_bytes, count, size, out, kBlock);
}

#if defined(__AVX512VNNI__)
constexpr size_t kFloatRows = 6, kFloatVectors = 4;
#elif defined(__AVX2__)
constexpr size_t kFloatRows = 3, kFloatVectors = 4;
#elif defined(NEON)
constexpr size_t kFloatRows = 6, kFloatVectors = 4;
#else
constexpr size_t kFloatRows = 1, kFloatVectors = 16;
#endif

// kRows rows of a matrix times kVectors vectors of columns, in the order of the inner index:
// out[r][c] = factors[r] * sum over i < size of left[r][i] * right[i][c]
// With each i, some lines of `next` are prefetched.
template <size_t kRows, size_t kVectors>
inline void multiply_floats_tile(const float* left, size_t left_stride, const float* right,
                                 size_t right_stride, size_t size, const float* factors,
                                 float* const* out, size_t column, Prefetch& next, size_t num_lines) {
  Floats sums[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  for (size_t i = 0; i < size; ++i) {
    fetch(next, num_lines);
    Floats columns[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      columns[v] = load(right + i * right_stride + column + v * kWidth);
    }
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      const Floats factor = splat(left[r * left_stride + i]);
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = fma(factor, columns[v], sums[r][v]);
      }
    }
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      store(out[r] + column + v * kWidth, mul(sums[r][v], splat(factors[r])));
    }
  }
}

template <size_t kRows>
void multiply_floats(size_t num_rows, const float* left, size_t left_stride, const float* right,
                     size_t right_stride, size_t size, const float* factors, float* const* out,
                     size_t num_columns, Prefetch next = {}) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_floats<kRows - 1>(num_rows, left, left_stride, right, right_stride, size,
                                        factors, out, num_columns, next);
    }
  }
  constexpr size_t kColumns = kFloatVectors * kWidth;
  const size_t num_lines = next.lines_each(size * (num_columns / kColumns));
  size_t column = 0;
  for (; column + kColumns <= num_columns; column += kColumns) {
    multiply_floats_tile<kRows, kFloatVectors>(left, left_stride, right, right_stride, size,
                                               factors, out, column, next, num_lines);
  }
  for (; column < num_columns; column += kWidth) {
    multiply_floats_tile<kRows, 1>(left, left_stride, right, right_stride, size, factors, out,
                                   column, next, num_lines);
  }
}

// The maximum of at least one score; NaN does not count, but for the first score.
inline float greatest(const float* scores, size_t length) {
  // Two chains, since each vector waits for the one before it.
  Floats largest = splat(scores[0]), others = largest;
  size_t i = 0;
  for (; i + 2 * kWidth <= length; i += 2 * kWidth) {
    largest = max(load(scores + i), largest);
    others = max(load(scores + i + kWidth), others);
  }
  for (; i + kWidth <= length; i += kWidth) largest = max(load(scores + i), largest);
  for (; i < length; ++i) largest = max(splat(scores[i]), largest);
  return largest_lane(max(others, largest));
}

// Turns the scores from `begin` to `length` into exp(score - maximum), and those before and after them,
// up to `stride`, into zeros; returns 1 / their sum. A sink takes part in the maximum and in the sum.
float softmax_row(float* scores, size_t length, size_t stride, size_t begin = 0,
                  const float* sink = nullptr) {
  constexpr size_t kVectors = kLanes / kWidth;
  float largest = greatest(scores + begin, length - begin);
  if (sink != nullptr && *sink > largest) largest = *sink;
  const Floats peak = splat(-largest);
  const auto weight = [&](size_t i) { return exponential(add(load(scores + i), peak)); };
  Floats sums[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
  size_t i = begin / kLanes * kLanes;
  std::memset(scores, 0, i * sizeof(float));
  // Each weight is added to the sum of its place among kLanes, wherever the first one is.
  const auto add_lanes = [&] {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = add(sums[v], load(scores + i + v * kWidth));
    }
  };
  if (i < begin) {
    for (size_t j = i; j < i + kLanes && j < length; j += kWidth) store(scores + j, weight(j));
    std::memset(scores + i, 0, (begin - i) * sizeof(float));
    if (length <= i + kLanes) std::memset(scores + length, 0, (stride - length) * sizeof(float));
    add_lanes();
    i += kLanes;
  }
  for (; i + kLanes <= length; i += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const Floats weights = weight(i + v * kWidth);
      store(scores + i + v * kWidth, weights);
      sums[v] = add(sums[v], weights);
    }
  }
  for (size_t j = i; j < length; j += kWidth) store(scores + j, weight(j));
  std::memset(scores + length, 0, (stride - length) * sizeof(float));
  if (i < length) add_lanes();
  float sum = sum_of_lanes(sums);
  if (sink != nullptr) {
    float weights[kWidth];
    store(weights, exponential(splat(*sink - largest)));
    sum += weights[0];
  }
  return 1.0f / sum;
}

// Softmax of num_rows rows of scores from `row` on, in place but for the division; `inverse_sums` and
// `out` get 1 / sum and the results' addresses.
void softmax_rows(const Queries& queries, float* scores, size_t row, size_t num_rows,
                 float* inverse_sums, float** out) {
  const size_t stride = queries.score_stride();
  for (size_t r = 0; r < num_rows; ++r) {
    const size_t token = (row + r) / queries.group, head = (row + r) % queries.group;
    inverse_sums[r] = softmax_row(scores + (row + r) * stride, queries.length(row + r), stride,
                                  queries.begin(row + r),
                                  queries.sinks == nullptr ? nullptr : queries.sinks + head);
    out[r] = queries.out + token * queries.out_stride + head * queries.head_size;
  }
}

// Keys and values are prefetched this many tokens ahead.
constexpr size_t kFetched = kKeyBlock;

// Softmax of all rows of scores, [num_rows][score_stride], times the values.
void softmax_times_values(const Queries& queries, float* scores, const float* values) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float factors[kFloatRows];
  float* out[kFloatRows];
  for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
    const size_t some = queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
    softmax_rows(queries, scores, row, some, factors, out);
    const size_t begin = queries.begin(row), longest = queries.length(row + some - 1);
    const size_t fetched = begin + kFetched;
    Prefetch next;
    if (row == 0 && longest > fetched) {
      next = {reinterpret_cast<const uint8_t*>(values + fetched * size),
              (longest - fetched) * size * sizeof(float)};
    }
    multiply_floats<kFloatRows>(some, scores + row * stride + begin, stride, values + begin * size,
                                size, longest - begin, factors, out, size, next);
  }
}

void attend(const Queries& queries, const FloatHead& head, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float* transposed = scratch + queries.num_rows * stride;
  float factors[kFloatRows];
  float* out[kFloatRows];
  const size_t longest = queries.longest(), token_bytes = size * sizeof(float);
  for (size_t start = 0; start < longest; start += kKeyBlock) {
    const size_t left = longest - start, count = left < kKeyBlock ? left : kKeyBlock;
    transpose<kKeyBlock>(head.keys + start * size, token_bytes, count, size, transposed);
    const float* after = left == count ? head.values : head.keys + (start + count) * size;
    const size_t num_after = left == count ? longest : left - count;
    Prefetch next = {reinterpret_cast<const uint8_t*>(after),
                  (num_after < kFetched ? num_after : kFetched) * token_bytes};
    for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
      const size_t some =
          queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
      if (queries.length(row + some - 1) <= start) continue;
      for (size_t r = 0; r < some; ++r) {
        factors[r] = head.scale;
        out[r] = scratch + (row + r) * stride + start;
      }
      multiply_floats<kFloatRows>(some, head.rows + row * size, size, transposed, kKeyBlock, size,
                                  factors, out, kKeyBlock, next);
      next = {};
    }
  }
  softmax_times_values(queries, scratch, head.values);
}

}  // namespace
