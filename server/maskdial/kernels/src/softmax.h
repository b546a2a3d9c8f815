// Rotated heads, and softmax attention over them.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

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

// e to the power of x <= 0; below -87, where floats end, as for -87. The polynomial is that of
// Cephes' expf, exact to a bit or two.
inline Floats exponential(Floats x) {
  x = max(x, splat(-87.0f));
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

// out[d][i] = rows[i][d] for kKeyBlock rows, of which count are there.
void transpose(const float* rows, size_t count, size_t size, float* out) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + 4 <= count; i += 4) {
    const float* p = rows + i * size;
    for (size_t d = 0; d < size; d += 4) {
      __m128 a = _mm_loadu_ps(p + d), b = _mm_loadu_ps(p + size + d);
      __m128 c = _mm_loadu_ps(p + 2 * size + d), e = _mm_loadu_ps(p + 3 * size + d);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      _mm_storeu_ps(out + d * kKeyBlock + i, a);
      _mm_storeu_ps(out + (d + 1) * kKeyBlock + i, b);
      _mm_storeu_ps(out + (d + 2) * kKeyBlock + i, c);
      _mm_storeu_ps(out + (d + 3) * kKeyBlock + i, e);
    }
  }
#endif
  for (; i < count; ++i) {
    for (size_t d = 0; d < size; ++d) out[d * kKeyBlock + i] = rows[i * size + d];
  }
  for (size_t d = 0; d < size && count < kKeyBlock; ++d) {
    std::memset(out + d * kKeyBlock + count, 0, (kKeyBlock - count) * sizeof(float));
  }
}

#if defined(__AVX512VNNI__)
constexpr size_t kFloatRows = 6, kFloatVectors = 4;
#elif defined(__AVX2__)
constexpr size_t kFloatRows = 3, kFloatVectors = 4;
#else
constexpr size_t kFloatRows = 1, kFloatVectors = 16;
#endif

// kRows rows of a matrix times kVectors vectors of columns, in the order of the inner index:
// out[r][c] = factors[r] * sum over i < size of left[r][i] * right[i][c]
template <size_t kRows, size_t kVectors>
inline void multiply_floats_tile(const float* left, size_t left_stride, const float* right,
                                 size_t right_stride, size_t size, const float* factors,
                                 float* const* out, size_t column) {
  Floats sums[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  for (size_t i = 0; i < size; ++i) {
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
                     size_t num_columns) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_floats<kRows - 1>(num_rows, left, left_stride, right, right_stride, size,
                                        factors, out, num_columns);
    }
  }
  size_t column = 0;
  for (; column + kFloatVectors * kWidth <= num_columns; column += kFloatVectors * kWidth) {
    multiply_floats_tile<kRows, kFloatVectors>(left, left_stride, right, right_stride, size,
                                               factors, out, column);
  }
  for (; column < num_columns; column += kWidth) {
    multiply_floats_tile<kRows, 1>(left, left_stride, right, right_stride, size, factors, out,
                                   column);
  }
}

// Turns scores into e to the power of score - largest, followed by zeros; returns 1 / their sum.
float soften(float* scores, size_t length, size_t stride) {
  Floats largest = splat(scores[0]);
  for_each_vector(length, [&](size_t i, size_t count) {
    if (count == kWidth) largest = max(load(scores + i), largest);
    for (size_t j = i; count < kWidth && j < length; ++j) {
      largest = max(splat(scores[j]), largest);
    }
  });
  float lanes[kLanes];
  store(lanes, largest);
  float peak = lanes[0];
  for (size_t i = 1; i < kWidth; ++i) peak = lanes[i] > peak ? lanes[i] : peak;
  const Floats peaks = splat(-peak);
  for (size_t i = 0; i < length; i += kWidth) {
    store(scores + i, exponential(add(load(scores + i), peaks)));
  }
  std::memset(scores + length, 0, (stride - length) * sizeof(float));
  Floats sums[kLanes / kWidth];
  UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) sums[v] = splat(0.0f);
  for (size_t i = 0; i < length; i += kLanes) {
    UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) {
      sums[v] = add(sums[v], load(scores + i + v * kWidth));
    }
  }
  UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) store(lanes + v * kWidth, sums[v]);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return 1.0f / sum;
}

void attend(const Queries& queries, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float* transposed = scratch + queries.num_rows * stride;
  float factors[kFloatRows];
  float* out[kFloatRows];
  for (size_t start = 0; start < queries.longest(); start += kKeyBlock) {
    const size_t left = queries.longest() - start;
    transpose(queries.keys + start * size, left < kKeyBlock ? left : kKeyBlock, size, transposed);
    for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
      const size_t some =
          queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
      if (queries.length(row + some - 1) <= start) continue;
      for (size_t r = 0; r < some; ++r) {
        factors[r] = queries.scale;
        out[r] = scratch + (row + r) * stride + start;
      }
      multiply_floats<kFloatRows>(some, queries.rows + row * size, size, transposed, kKeyBlock,
                                  size, factors, out, kKeyBlock);
    }
  }
  for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
    const size_t some = queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
    for (size_t r = 0; r < some; ++r) {
      const size_t token = (row + r) / queries.group, head = (row + r) % queries.group;
      factors[r] = soften(scratch + (row + r) * stride, queries.length(row + r), stride);
      out[r] = queries.out + token * queries.out_stride + head * size;
    }
    multiply_floats<kFloatRows>(some, scratch + row * stride, stride, queries.values, size,
                                queries.length(row + some - 1), factors, out, size);
  }
}

}  // namespace
