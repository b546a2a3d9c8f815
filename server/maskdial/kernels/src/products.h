// Products of quantized rows with panels of weights.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "activations.h"
#include "vectors.h"

namespace {

// Weights arrive at the pace of the products only if they are prefetched early: the next panel, while
// this one is multiplied, into the level-2 cache (a prefetch beyond the matrix does nothing), and this
// many bytes ahead from there.
constexpr size_t kPrefetched = 2048;
// After each group of this many quads, a few lines of the next panel are prefetched.
constexpr size_t kQuadGroup = 4;

// Stores a vector of a product, from a column on.
inline void put(const Result& to, size_t row, size_t column, Floats product) {
  if (to.deltas != nullptr) {
    product = add(product, load(to.deltas + row * to.delta_stride + column));
  }
  if (to.gelu) product = gelu(product);
  if (to.gates != nullptr) {
    product = mul(silu(load(to.gates + row * to.gate_stride + column)), product);
  }
  const size_t left = to.num_columns - column;
  store_some(to.out + row * to.stride + column, product, left < kWidth ? left : kWidth);
}

// The results of a tile's sums [num_rows][num_columns].
void finish_tile(const int32_t* sums, const uint8_t* rows, size_t num_rows, size_t num_columns,
                 const Panel& panel, size_t first, const float* peaks, const Result& to) {
  const size_t last = first + num_columns < to.num_columns ? first + num_columns : to.num_columns;
  for (size_t r = 0; r < num_rows; ++r, sums += num_columns) {
#ifdef INVERTED_WEIGHTS
    const Sums missing = missing_of(rows + r * panel.num_quads * kQuad, panel.num_quads * kQuad);
#endif
    for (size_t column = first; column < last; column += kWidth) {
      Sums sum = load_sums(sums + column - first);
#ifdef INVERTED_WEIGHTS
      sum = add_sums(sum, missing);
#endif
      Floats product = mul(to_floats(sum), load(panel.factors + column));
      if (peaks != nullptr) product = mul(product, splat(peaks[r]));
      if (panel.biases != nullptr) product = add(product, load(panel.biases + column));
      put(to, r, column, product);
    }
  }
}

// A tile of kRows rows and kVectors vectors of columns of a panel of kColumns. Its sums stay in
// registers. With kForeseen, the hardware prefetches the weights.
template <size_t kColumns, size_t kRows, size_t kVectors, bool kForeseen>
inline void multiply_tile(const uint8_t* rows, const Panel& panel, size_t first,
                          const Prefetch& prefetch, const float* peaks, const Result& to) {
  const size_t row_stride = panel.num_quads * kQuad;
  const int8_t* weights = panel.weights + first * kQuad;
  Sums sums[kRows][kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) {
#ifdef SIGNED_INPUTS
    const Sums start = zero_sums();
#else
    const Sums start = load_sums(panel.corrections + first + v * kWidth);
#endif
    UNROLL for (size_t r = 0; r < kRows; ++r) sums[r][v] = start;
  }
  const size_t num_groups = (panel.num_quads + kQuadGroup - 1) / kQuadGroup;
  const size_t group_lines = prefetch.lines_each(num_groups);
  const uint8_t* next = prefetch.bytes;
  for (size_t q = 0; q < panel.num_quads;) {
    for (size_t line = 0; line < group_lines; ++line, next += kLine) {
      __builtin_prefetch(next, 0, 2);
    }
    // The place of a row's results, too: stores to places that are not in the cache take their time.
    if (q < kRows * kQuadGroup) {
      const float* place = to.out + q / kQuadGroup * to.stride + first;
      for (size_t v = 0; v < kVectors; ++v) __builtin_prefetch(place + v * kWidth);
    }
    const size_t end = panel.num_quads - q < kQuadGroup ? panel.num_quads : q + kQuadGroup;
    for (; q < end; ++q, weights += kColumns * kQuad) {
      for (size_t byte = 0; byte < kVectors * kWidth * kQuad && !kForeseen; byte += kLine) {
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
  }
  // Loops over registers end here: later code reads the sums from memory.
  int32_t results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store_sums(results[r] + v * kWidth, sums[r][v]);
  }
  finish_tile(results[0], rows, kRows, kVectors * kWidth, panel, first, peaks, to);
}

// Rows and vectors of a tile: as many sums as there are registers for.
#if defined(__AVX512VNNI__)
constexpr size_t kMaxSums = 24;
template <size_t kColumns>
constexpr size_t kTileVectors = kColumns % (3 * kWidth) == 0 ? 3 : 2;
template <size_t kColumns>
constexpr size_t kTileRows = kMaxSums / kTileVectors<kColumns>;
#elif defined(__AVXVNNI__)
constexpr size_t kMaxSums = 12;
template <size_t kColumns>
constexpr size_t kTileVectors = 2;
template <size_t kColumns>
constexpr size_t kTileRows = 6;
#elif defined(__AVX2__)
constexpr size_t kMaxSums = 12;
// The signs of inputs have to be prepared for each tile, so that wide ones take less.
template <size_t kColumns>
constexpr size_t kTileVectors = kColumns % 48 == 0 ? 6 : 2;
template <size_t kColumns>
constexpr size_t kTileRows = kColumns % 48 == 0 ? 2 : 4;
#elif defined(NEON)
constexpr size_t kMaxSums = 24;
template <size_t kColumns>
constexpr size_t kTileVectors = 4;
#if defined(__ARM_FEATURE_DOTPROD)
template <size_t kColumns>
constexpr size_t kTileRows = 6;
#else
template <size_t kColumns>
constexpr size_t kTileRows = 4;
#endif
#else
constexpr size_t kMaxSums = 4;
template <size_t kColumns>
constexpr size_t kTileVectors = 4;
template <size_t kColumns>
constexpr size_t kTileRows = 1;
#endif
static_assert(kMaxRows % kTileRows<kPanel> == 0 && kMaxRows % kTileRows<kPanel4> == 0);

// Few rows have sums for all columns of a panel, which is then read from its beginning to its end.
template <size_t kColumns, size_t kRows>
constexpr size_t kVectorsOf =
    kRows * kColumns <= kMaxSums * kWidth ? kColumns / kWidth : kTileVectors<kColumns>;

template <size_t kColumns, size_t kRows>
void multiply_rows(size_t num_rows, const uint8_t* rows, const Panel& panel, const Prefetch& prefetch,
                   const float* peaks, const Result& to) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_rows<kColumns, kRows - 1>(num_rows, rows, panel, prefetch, peaks, to);
    }
  }
  constexpr size_t kVectors = kVectorsOf<kColumns, kRows>, kTileColumns = kVectors * kWidth;
  if constexpr (kTileColumns == kColumns) {
    // The panel is read from its beginning to its end, perhaps by this tile only.
    if (kHardwarePrefetches) {
      // The next panel of keys does not follow in memory.
      const bool alone = kColumns == kPanel && prefetch.size == panel.prefetch.size;
      return multiply_tile<kColumns, kRows, kVectors, true>(
          rows, panel, 0, alone ? Prefetch{} : prefetch, peaks, to);
    }
  }
  const size_t num_tiles = (to.num_columns + kTileColumns - 1) / kTileColumns;
  Prefetch part = {prefetch.bytes, prefetch.size / num_tiles};
  for (size_t first = 0; first < to.num_columns; first += kTileColumns, part.bytes += part.size) {
    multiply_tile<kColumns, kRows, kVectors, false>(rows, panel, first, part, peaks, to);
  }
}

// The rows of each tile if there are to be as few tiles as possible, and all alike.
inline size_t rows_of_tiles(size_t num_rows, size_t max_rows) {
  const size_t num_tiles = (num_rows + max_rows - 1) / max_rows;
  return (num_rows + num_tiles - 1) / num_tiles;
}

template <size_t kColumns>
void multiply(const uint8_t* rows, size_t num_rows, const Panel& panel, const float* peaks,
              const Result& result) {
  const size_t tile_rows = rows_of_tiles(num_rows, kTileRows<kColumns>);
  Prefetch prefetch = {panel.prefetch.bytes, panel.prefetch.size * tile_rows / num_rows};
  for (size_t row = 0; row < num_rows; row += tile_rows, prefetch.bytes += prefetch.size) {
    const size_t some = num_rows - row < tile_rows ? num_rows - row : tile_rows;
    multiply_rows<kColumns, kTileRows<kColumns>>(some, rows + row * panel.num_quads * kQuad, panel,
                                                 prefetch, peaks == nullptr ? nullptr : peaks + row,
                                                 result.from(row));
  }
}

}  // namespace
