// Rows of scores over a vocabulary: their softmax's denominator, and the scores that are large enough.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "softmax.h"

namespace {

constexpr float kLowest = -INFINITY;

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

float find_max(const float* scores, size_t size) {
  constexpr size_t kVectors = kLanes / kWidth;
  Floats peaks[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) peaks[v] = splat(kLowest);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      peaks[v] = max(load(scores + i + v * kWidth), peaks[v]);
    }
  }
  float lanes[kLanes];
  UNROLL for (size_t v = 0; v < kVectors; ++v) store(lanes + v * kWidth, peaks[v]);
  float peak = kLowest;
  for (float lane : lanes) peak = lane > peak ? lane : peak;
  for (; i < size; ++i) peak = scores[i] > peak ? scores[i] : peak;
  return peak;
}

// Adds up weight(scores), floats, in blocks of kSumBlock, and stores the weights unless `weights` is
// null. The padding of the last vector has scores of -inf.
template <typename Weight>
double add_up(const float* scores, size_t size, float* weights, double* sums, Weight weight) {
  constexpr size_t kVectors = kLanes / kWidth;
  double total = 0.0;
  for (size_t start = 0; start < size; start += kSumBlock) {
    const size_t end = smaller(start + kSumBlock, size);
    Floats parts[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) parts[v] = splat(0.0f);
    const auto add_some = [&](const float* from, float* to) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        const Floats some = weight(load(from + v * kWidth));
        if (to != nullptr) store(to + v * kWidth, some);
        parts[v] = add(parts[v], some);
      }
    };
    size_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      add_some(scores + i, weights == nullptr ? nullptr : weights + i);
    }
    float lanes[kLanes];
    if (i < end) {
      for (float& lane : lanes) lane = kLowest;
      std::memcpy(lanes, scores + i, (end - i) * sizeof(float));
      add_some(lanes, lanes);
      if (weights != nullptr) std::memcpy(weights + i, lanes, (end - i) * sizeof(float));
    }
    UNROLL for (size_t v = 0; v < kVectors; ++v) store(lanes + v * kWidth, parts[v]);
    double sum = 0.0;
    for (float lane : lanes) sum += static_cast<double>(lane);
    if (sums != nullptr) sums[start / kSumBlock] = sum;
    total += sum;
  }
  return total;
}

double exponentials(const float* scores, size_t size, float max_score, float factor, float* weights,
             double* sums) {
  const Floats peaks = splat(max_score), factors = splat(factor), zero = splat(0.0f);
  return add_up(scores, size, weights, sums, [&](Floats some) {
    const Floats log = mul(sub(some, peaks), factors);
    return select_above(log, splat(kMinExponent), exponential(log), zero);
  });
}

double sum_above(const float* weights, size_t size, float floor, double* sums) {
  const Floats floors = splat(floor), zero = splat(0.0f);
  return add_up(weights, size, nullptr, sums,
                [&](Floats some) { return select_above(some, floors, some, zero); });
}

LogitsSummary summarize(const float* scores, size_t size) {
  const Floats zero = splat(0.0f), minus_one = splat(-1.0f);
  Floats valid = zero;
  float peak = kLowest;
  size_t best = 0;
  for (size_t start = 0; start < size; start += kScoreBlock) {
    const size_t count = smaller(kScoreBlock, size - start);
    const float of_block = find_max(scores + start, count);
    if (of_block > peak) {
      peak = of_block;
      best = start;
    }
    for_each_vector(count, [&](size_t i, size_t left) {
      // Between -1 and 0 for infinite numbers, too.
      valid = add(valid, max(minus_one, min(zero, load_some(scores + start + i, left))));
    });
  }
  float lanes[kWidth];
  store(lanes, valid);
  for (float lane : lanes) {
    if (!(lane <= 0.0f)) return {0, NAN, 0.0};
  }
  while (scores[best] != peak) ++best;
  double total = 0.0;
  if (peak - peak == 0.0f) {
    const Floats peaks = splat(peak);
    const auto weight = [&](Floats some) { return exponential(sub(some, peaks)); };
    total = add_up(scores, size, nullptr, nullptr, weight);
  }
  return {static_cast<int64_t>(best), peak, total};
}

// Writes the indices of the lanes that are set in chosen(scores), ascending.
template <typename Chosen>
size_t find(const float* scores, size_t size, int64_t* out, Chosen chosen) {
  size_t found = 0;
  for_each_vector(size, [&](size_t i, size_t left) {
    uint32_t lanes = chosen(load_some(scores + i, left)) & ((1u << left) - 1);
    for (; lanes != 0; lanes &= lanes - 1) {
      out[found++] = static_cast<int64_t>(i + static_cast<size_t>(__builtin_ctz(lanes)));
    }
  });
  return found;
}

size_t find_at_least(const float* scores, size_t size, float threshold, int64_t* out) {
  const Floats thresholds = splat(threshold);
  return find(scores, size, out, [&](Floats some) { return lanes_at_least(some, thresholds); });
}

size_t find_between(const float* scores, size_t size, float floor, float ceiling, int64_t* out) {
  const Floats floors = splat(floor), ceilings = splat(ceiling);
  return find(scores, size, out, [&](Floats some) {
    return lanes_at_least(ceilings, some) & ~lanes_at_least(floors, some);
  });
}

}  // namespace
