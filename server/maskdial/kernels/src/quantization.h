// Rows of floats as bytes.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "vectors.h"

namespace {

constexpr float kZeroPoint = 128.0f;

// Division by a number that stays the same, by multiplications, which take a fifth of the time. Two
// corrections by the remainder make a quotient the nearest float (Markstein, IBM J. Res. Dev. 34-1,
// 1990: the first one brings it within a unit in the last place, the second one is then exact),
// unless an exponent is near the ends of its range.
struct Divisor {
  Floats negative, reciprocal;

  explicit Divisor(float value) : negative(splat(-value)), reciprocal(splat(1.0f / value)) {}

  // Whether quotients are exact, unless they are smaller than 2 to the power of -40.
  static bool fits(float value) { return value > 0x1p-60f && value < 0x1p60f; }
};

inline Floats quotient(Floats value, const Divisor& by) {
  Floats result = mul(value, by.reciprocal);
  result = fma(fma(result, by.negative, value), by.reciprocal, result);
  return fma(fma(result, by.negative, value), by.reciprocal, result);
}

// The integers that QuantizeLinear rounds to, less the zero point; what is not a number is least.
inline Floats limited(Floats integers) {
  return min(max(integers, splat(-kZeroPoint)), splat(255.0f - kZeroPoint));
}

void quantize(const float* row, size_t size, float step, uint8_t* out) {
  if (Divisor::fits(step)) {
    const Divisor by(step);
    // What is beyond becomes the least or the most integer; a remainder of infinity is no number.
    const Floats most = splat(256.0f * step), least = splat(-256.0f * step);
    for_each_vector(size, [&](size_t i, size_t count) {
      const Floats value = min(max(load_some(row + i, count), least), most);
      store_some_bytes(out + i, limited(quotient(value, by)), count);
    });
    return;
  }
  const Floats steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some_bytes(out + i, limited(div(load_some(row + i, count), steps)), count);
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
  if (Divisor::fits(peak) && Divisor::fits(step)) {
    const Divisor peaks(peak), steps(step);
    for_each_vector(size, [&](size_t i, size_t count) {
      const Floats unit = quotient(load_some(row + i, count), peaks);
      store_some_bytes(out + i, limited(quotient(unit, steps)), count);
    });
    return peak;
  }
  const Floats peaks = splat(peak), steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats unit = div(load_some(row + i, count), peaks);
    store_some_bytes(out + i, limited(div(unit, steps)), count);
  });
  return peak;
}

}  // namespace
