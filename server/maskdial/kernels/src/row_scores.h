// Rows of scores over a vocabulary: their softmax's denominator, and the scores that are large enough.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "softmax.h"

namespace {

// Sums of floats are short; those of blocks are added up as doubles.
constexpr size_t kSumBlock = 512;
constexpr float kLeast = -INFINITY;

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

float find_peak(const float* scores, size_t size) {
  constexpr size_t kVectors = kLanes / kWidth;
  Floats peaks[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) peaks[v] = splat(kLeast);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      peaks[v] = max(load(scores + i + v * kWidth), peaks[v]);
    }
  }
  float lanes[kLanes];
  UNROLL for (size_t v = 0; v < kVectors; ++v) store(lanes + v * kWidth, peaks[v]);
  float peak = kLeast;
  for (float lane : lanes) peak = lane > peak ? lane : peak;
  for (; i < size; ++i) peak = scores[i] > peak ? scores[i] : peak;
  return peak;
}

// Adds up weights, those of blocks as doubles: of all scores and, if kEdges is kWeightEdges, of those
// above each edge.
template <size_t kEdges>
void sum_blocks(const float* scores, size_t size, float peak, float factor, double* totals) {
  constexpr size_t kVectors = kLanes / kWidth;
  const Floats peaks = splat(peak), factors = splat(factor), zero = splat(0.0f);
  for (size_t j = 0; j <= kEdges; ++j) totals[j] = 0.0;
  for (size_t start = 0; start < size; start += kSumBlock) {
    const size_t end = smaller(start + kSumBlock, size);
    Floats sums[kEdges + 1][kVectors];
    UNROLL for (size_t j = 0; j <= kEdges; ++j) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) sums[j][v] = zero;
    }
    const auto add_weights = [&](const float* from) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        const Floats log = mul(sub(load(from + v * kWidth), peaks), factors);
        const Floats weight = exponential(log);
        UNROLL for (size_t j = 0; j < kEdges; ++j) {
          const Floats above = select_above(log, splat(kWeightEdge[j]), weight, zero);
          sums[j][v] = add(sums[j][v], above);
        }
        sums[kEdges][v] = add(sums[kEdges][v], weight);
      }
    };
    size_t i = start;
    for (; i + kLanes <= end; i += kLanes) add_weights(scores + i);
    float lanes[kLanes];
    if (i < end) {
      for (float& lane : lanes) lane = kLeast;
      std::memcpy(lanes, scores + i, (end - i) * sizeof(float));
      add_weights(lanes);
    }
    UNROLL for (size_t j = 0; j <= kEdges; ++j) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) store(lanes + v * kWidth, sums[j][v]);
      for (float lane : lanes) totals[j] += static_cast<double>(lane);
    }
  }
}

void sum_weights(const float* scores, size_t size, float peak, float factor, double* totals) {
  sum_blocks<kWeightEdges>(scores, size, peak, factor, totals);
}

RowSummary summarize(const float* scores, size_t size) {
  const Floats zero = splat(0.0f), minus_one = splat(-1.0f);
  Floats valid = zero;
  float peak = kLeast;
  size_t best = 0;
  for (size_t start = 0; start < size; start += kScoreBlock) {
    const size_t count = smaller(kScoreBlock, size - start);
    const float of_block = find_peak(scores + start, count);
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
  if (peak - peak == 0.0f) sum_blocks<0>(scores, size, peak, 1.0f, &total);
  return {static_cast<int64_t>(best), peak, total};
}

size_t find_at_least(const float* scores, size_t size, float threshold, int64_t* out) {
  size_t found = 0;
  for (size_t start = 0; start < size; start += kScoreBlock) {
    const size_t end = smaller(start + kScoreBlock, size);
    if (!(find_peak(scores + start, end - start) >= threshold)) continue;
    for (size_t i = start; i < end; ++i) {
      out[found] = static_cast<int64_t>(i);
      found += scores[i] >= threshold;
    }
  }
  return found;
}

}  // namespace
