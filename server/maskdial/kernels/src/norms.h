// Norms of a sum.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "vectors.h"

namespace {

// Accumulates the vectors of a row, and then the floats that are left, in an order that is the same
// for vectors of any width.
template <typename Accumulate, typename AccumulateOne>
inline float sum_lanes(const float* row, size_t size, Accumulate accumulate,
                       AccumulateOne accumulate_one) {
  constexpr size_t kVectors = kLanes / kWidth;
  Floats sums[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = accumulate(load(row + i + v * kWidth), sums[v]);
    }
  }
  float lanes[kLanes];
  UNROLL for (size_t v = 0; v < kVectors; ++v) store(lanes + v * kWidth, sums[v]);
  for (size_t lane = 0; i + lane < size; ++lane) {
    lanes[lane] = accumulate_one(row[i + lane], lanes[lane]);
  }
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

void add_norm(const float* x, const float* residual, size_t size, const float* weight,
              const float* bias, float epsilon, float* out) {
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some(out + i, add(load_some(x + i, count), load_some(residual + i, count)), count);
  });
  const float mean = sum_lanes(
                         out, size, [](Floats v, Floats sum) { return add(sum, v); },
                         [](float v, float sum) { return sum + v; }) /
                     static_cast<float>(size);
  const Floats means = splat(mean);
  const float variance = sum_lanes(
                             out, size,
                             [&](Floats v, Floats sum) {
                               const Floats difference = sub(v, means);
                               return fma(difference, difference, sum);
                             },
                             [&](float v, float sum) {
                               const float difference = v - mean;
                               return std::fmaf(difference, difference, sum);
                             }) /
                         static_cast<float>(size);
  const Floats factor = splat(1.0f / std::sqrt(variance + epsilon));
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats unit = mul(sub(load_some(out + i, count), means), factor);
    const Floats scaled = mul(unit, load_some(weight + i, count));
    store_some(out + i, bias == nullptr ? scaled : add(scaled, load_some(bias + i, count)), count);
  });
}

void add_rms_norm(const float* x, const float* residual, size_t size, const float* weight,
                  float epsilon, float* sum, float* out) {
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some(sum + i, add(load_some(x + i, count), load_some(residual + i, count)), count);
  });
  const float mean_square = sum_lanes(
                                sum, size, [](Floats v, Floats total) { return fma(v, v, total); },
                                [](float v, float total) { return std::fmaf(v, v, total); }) /
                            static_cast<float>(size);
  const Floats factor = splat(1.0f / std::sqrt(mean_square + epsilon));
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats unit = mul(load_some(sum + i, count), factor);
    store_some(out + i, mul(unit, load_some(weight + i, count)), count);
  });
}

}  // namespace
