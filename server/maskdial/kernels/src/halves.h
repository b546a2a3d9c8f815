// Floats of 16 bits (IEEE 754, binary16).
//
// Nothing here has external linkage: see vectors.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// 0x1.mp(e - 15), and 0x0.mp-14 for an exponent of 0.
[[maybe_unused]] float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t biased = exponent == 31 ? 255 : exponent + 127 - 15;
  const uint32_t bits = sign | biased << 23 | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Whether a finite float is one of 16 bits, which is then written to `half`.
[[maybe_unused]] bool float_to_half(float value, uint16_t& half) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const int exponent = static_cast<int>(bits >> 23 & 255) - 127;
  uint32_t mantissa = bits & 0x7fffff;
  if ((bits & 0x7fffffff) == 0) {
    half = sign;
    return true;
  }
  if (exponent < -24 || exponent > 15) return false;
  uint32_t shift = 13, high = static_cast<uint32_t>(exponent + 15) << 10;
  if (exponent < -14) {
    mantissa |= 0x800000;
    shift += static_cast<uint32_t>(-14 - exponent);
    high = 0;
  }
  if ((mantissa & ((1u << shift) - 1)) != 0) return false;
  half = static_cast<uint16_t>(sign | high | mantissa >> shift);
  return true;
}

}  // namespace
