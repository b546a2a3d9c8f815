// Quantized rows, and their products with panels of weights.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "vectors.h"

namespace {

// Weights are read once per pass, in panels of a few kilobytes, each too short for the processor to
// foresee the next one. The last panel is followed by memory that is not the matrix's: a prefetch
// of it does nothing.
constexpr size_t kPrefetched = 4096, kLine = 64;

constexpr float kZeroPoint = 128.0f;

// The integers that QuantizeLinear rounds to, less the zero point; what is not a number is least.
inline Floats scaled(Floats values, Floats step) {
  const Floats integers = max(div(values, step), splat(-kZeroPoint));
  return min(integers, splat(255.0f - kZeroPoint));
}

void quantize(const float* row, size_t size, float step, uint8_t* out) {
  const Floats steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some_bytes(out + i, scaled(load_some(row + i, count), steps), count);
  });
}

float largest_magnitude(const float* row, size_t size) {
  Floats largest = splat(0.0f);
  for_each_vector(size, [&](size_t i, size_t count) {
    largest = max(magnitude(load_some(row + i, count)), largest);
  });
  float lanes[kWidth];
  store(lanes, largest);
  float peak = 0.0f;
  for (float lane : lanes) peak = lane > peak ? lane : peak;
  return peak;
}

float quantize_by_peak(const float* row, size_t size, float step, uint8_t* out) {
  const float peak = largest_magnitude(row, size);
  const Floats peaks = splat(peak), steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats unit = div(load_some(row + i, count), peaks);
    store_some_bytes(out + i, scaled(unit, steps), count);
  });
  return peak;
}

// A tile of kRows rows and kVectors vectors of columns. Its sums stay in registers.
template <size_t kRows, size_t kVectors>
inline void multiply_tile(const uint8_t* rows, const Panel& panel, size_t first,
                          const float* peaks, float* out, size_t out_stride, size_t num_columns) {
  const size_t row_stride = panel.num_quads * kQuad;
  const int8_t* weights = panel.weights + first * kQuad;
  Sums sums[kRows][kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) {
#ifdef SIGNED_INPUTS
    const Sums start = _mm256_setzero_si256();
#else
    const Sums start = load_sums(panel.corrections + first + v * kWidth);
#endif
    UNROLL for (size_t r = 0; r < kRows; ++r) sums[r][v] = start;
  }
  for (size_t q = 0; q < panel.num_quads; ++q, weights += kPanel * kQuad) {
    for (size_t byte = 0; byte < kVectors * kWidth * kQuad; byte += kLine) {
      __builtin_prefetch(weights + kPrefetched + byte);
    }
    Weights columns[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      columns[v] = load_weights(weights + v * kWidth * kQuad);
    }
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      int32_t quad;
      std::memcpy(&quad, rows + r * row_stride + q * kQuad, sizeof(quad));
      const Inputs inputs = splat_quad(quad);
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = add_products(sums[r][v], inputs, columns[v]);
      }
    }
  }
  // Loops over registers end here: what follows takes the sums from memory.
  int32_t results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store_sums(results[r] + v * kWidth, sums[r][v]);
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const size_t column = first + v * kWidth;
    if (column >= num_columns) break;
    const size_t count = num_columns - column < kWidth ? num_columns - column : kWidth;
    const Floats factors = load(panel.factors + column);
    for (size_t r = 0; r < kRows; ++r) {
      Floats result = mul(to_floats(load_sums(results[r] + v * kWidth)), factors);
      if (peaks != nullptr) result = mul(result, splat(peaks[r]));
      if (panel.biases != nullptr) result = add(result, load(panel.biases + column));
      store_some(out + r * out_stride + column, result, count);
    }
  }
}

// Vectors per tile: with more rows, fewer registers are left.
#if defined(__AVX512VNNI__)
constexpr size_t kTileRows = 12, kTileVectors = 2;
#elif defined(__AVXVNNI__)
constexpr size_t kTileRows = 6, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr size_t kTileRows = 4, kTileVectors = 2;
#else
constexpr size_t kTileRows = 1, kTileVectors = 4;
#endif

template <size_t kRows>
void multiply_rows(size_t num_rows, const uint8_t* rows, const Panel& panel, const float* peaks,
                   float* out, size_t out_stride, size_t num_columns) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_rows<kRows - 1>(num_rows, rows, panel, peaks, out, out_stride, num_columns);
    }
  }
  for (size_t first = 0; first < num_columns; first += kTileVectors * kWidth) {
    multiply_tile<kRows, kTileVectors>(rows, panel, first, peaks, out, out_stride, num_columns);
  }
}

void multiply(const uint8_t* rows, size_t num_rows, const Panel& panel, const float* peaks,
              float* out, size_t out_stride, size_t num_columns) {
  while (num_rows > 0) {
    const size_t some = num_rows < kTileRows ? num_rows : kTileRows;
    multiply_rows<kTileRows>(some, rows, panel, peaks, out, out_stride, num_columns);
    rows += some * panel.num_quads * kQuad;
    if (peaks != nullptr) peaks += some;
    out += some * out_stride;
    num_rows -= some;
  }
}

}  // namespace
