// Rows of floats as bytes.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "vectors.h"

namespace {

constexpr float kZeroPoint = 128.0f;

// Whether the inverse of a number, and that of its product with another such, is as exact as any.
inline bool has_inverse(float value) { return value > 0x1p-60f && value < 0x1p60f; }

// The integers that QuantizeLinear rounds to, less the zero point; NaN becomes the minimum.
inline Floats limited(Floats integers) {
  return min(max(integers, splat(-kZeroPoint)), splat(255.0f - kZeroPoint));
}

// How far the product with an inverse may be from the quotient, if that is below 256: the roundings of
// both change it by less than 3e-7 of itself.
constexpr float kUncertain = 1e-4f;

// Quantizes the quotients that `divide` returns for each vector of a row. The product with the
// divisor's inverse takes a fifth of the time; it suffices unless it is nearly halfway between two
// integers, or the inverse is not exact.
template <typename Divide>
inline void quantize_vectors(const float* row, size_t size, float divisor, bool is_exact,
                             uint8_t* out, Divide divide) {
  const Floats inverse = splat(1.0f / divisor), lowest = splat(-256.0f), highest = splat(255.0f);
  const Floats near = splat(is_exact ? 0.5f - kUncertain : -1.0f);
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats value = load_some(row + i, count);
    const Floats about = min(max(mul(value, inverse), lowest), highest);
    Floats integers = round(about);
    if (!all_below(magnitude(sub(about, integers)), near)) integers = divide(value);
    store_some_bytes(out + i, limited(integers), count);
  });
}

void quantize(const float* row, size_t size, float step, uint8_t* out) {
  const Floats steps = splat(step);
  quantize_vectors(row, size, step, has_inverse(step), out,
                   [&](Floats value) { return div(value, steps); });
}

float largest_magnitude(const float* row, size_t size) {
  Floats largest = splat(0.0f);
  for_each_vector(size, [&](size_t i, size_t count) {
    largest = max(magnitude(load_some(row + i, count)), largest);
  });
  return largest_lane(largest);
}

float quantize_by_peak(const float* row, size_t size, float step, uint8_t* out) {
  const float peak = largest_magnitude(row, size);
  const Floats peaks = splat(peak), steps = splat(step);
  quantize_vectors(row, size, peak * step, has_inverse(peak) && has_inverse(step), out,
                   [&](Floats value) { return div(div(value, peaks), steps); });
  return peak;
}

}  // namespace
