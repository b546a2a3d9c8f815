// Products of rows and an adapter's matrices. The order of a row's operations is the same on every processor,
// and with any other rows.
//
// Included by processor.cpp only: see vectors.h.
#pragma once

#include "vectors.h"

namespace {

constexpr size_t kLine = 64;

inline Floats load_number(const float* p) { return load(p); }
inline Floats load_number(const uint16_t* p) { return load_halves(p); }

// The vectors of a block.
constexpr size_t kBlockVectors = kLanes / kWidth;

// Bytes ahead of A's reader. The hardware's prefetcher ends at each page, and these streams are a few pages.
constexpr size_t kPrefetchedRank = 1024;

// While A is read, B is prefetched, which is read after the product of the weights.
template <typename Number>
void reduce_with(const LowRank& matrices, const Number* a, const float* row, float* out) {
  const auto* next = static_cast<const uint8_t*>(matrices.b);
  for (size_t first = 0; first < matrices.rank; first += kRankStep) {
    Floats sums[kRankStep][kBlockVectors];
    UNROLL for (size_t r = 0; r < kRankStep; ++r) {
      UNROLL for (size_t v = 0; v < kBlockVectors; ++v) sums[r][v] = splat(0.0f);
    }
    const auto add_block = [&](const float* numbers) {
      constexpr size_t kBytes = kRankStep * kLanes * sizeof(Number);
      UNROLL for (size_t byte = 0; byte < kBytes; byte += kLine) {
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(a) + kPrefetchedRank + byte);
        __builtin_prefetch(next + byte);
      }
      next += kBytes;
      UNROLL for (size_t v = 0; v < kBlockVectors; ++v) {
        const Floats x = load(numbers + v * kWidth);
        UNROLL for (size_t r = 0; r < kRankStep; ++r) {
          sums[r][v] = fma(x, load_number(a + r * kLanes + v * kWidth), sums[r][v]);
        }
      }
      a += kRankStep * kLanes;
    };
    size_t i = 0;
    for (; i + kLanes <= matrices.num_inputs; i += kLanes) add_block(row + i);
    if (i < matrices.num_inputs) {
      float rest[kLanes] = {};
      std::memcpy(rest, row + i, (matrices.num_inputs - i) * sizeof(float));
      add_block(rest);
    }
    UNROLL for (size_t r = 0; r < kRankStep; ++r) out[first + r] = sum_of_lanes(sums[r]);
  }
}

void reduce(const LowRank& matrices, const float* row, float* out) {
  if (matrices.halves) {
    return reduce_with(matrices, static_cast<const uint16_t*>(matrices.a), row, out);
  }
  reduce_with(matrices, static_cast<const float*>(matrices.a), row, out);
}

// kBlocks blocks of kRows rows: the sums over the rank, from the first to the last.
template <size_t kRows, size_t kBlocks, typename Number>
inline void expand_tile(size_t rank, const Number* b, const float* const* reduced, size_t column,
                        float* const* out) {
  constexpr size_t kVectors = kBlocks * kBlockVectors;
  Floats sums[kRows][kVectors];
  UNROLL for (size_t row = 0; row < kRows; ++row) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[row][v] = splat(0.0f);
  }
  for (size_t r = 0; r < rank; ++r, b += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const size_t place = v / kBlockVectors * rank * kLanes + v % kBlockVectors * kWidth;
      const Floats numbers = load_number(b + place);
      UNROLL for (size_t row = 0; row < kRows; ++row) {
        sums[row][v] = fma(splat(reduced[row][r]), numbers, sums[row][v]);
      }
    }
  }
  UNROLL for (size_t row = 0; row < kRows; ++row) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      float* place = out[row] + column + v * kWidth;
      store(place, add(load(place), sums[row][v]));
    }
  }
}

template <size_t kRows, typename Number>
void expand_rows(size_t num_rows, const LowRank& matrices, const Number* b,
                 const float* const* reduced, size_t num_blocks, float* const* out) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return expand_rows<kRows - 1>(num_rows, matrices, b, reduced, num_blocks, out);
    }
  }
  // As many sums as there are registers for.
  constexpr size_t kBlocks = kBlockVectors == 1 ? 3 : 1;
  const size_t stride = matrices.rank * kLanes;
  size_t block = 0;
  for (; block + kBlocks <= num_blocks; block += kBlocks) {
    expand_tile<kRows, kBlocks>(matrices.rank, b + block * stride, reduced, block * kLanes, out);
  }
  for (; block < num_blocks; ++block) {
    expand_tile<kRows, 1>(matrices.rank, b + block * stride, reduced, block * kLanes, out);
  }
}

void expand(const LowRank& matrices, const float* const* reduced, size_t num_rows, size_t block,
            size_t num_blocks, float* const* out) {
  const size_t first = block * matrices.rank * kLanes;
  if (matrices.halves) {
    const auto* b = static_cast<const uint16_t*>(matrices.b) + first;
    return expand_rows<kExpandedRows>(num_rows, matrices, b, reduced, num_blocks, out);
  }
  const auto* b = static_cast<const float*>(matrices.b) + first;
  expand_rows<kExpandedRows>(num_rows, matrices, b, reduced, num_blocks, out);
}

}  // namespace
