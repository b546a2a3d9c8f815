// Products of quantized rows with panels of weights by AMX, whose tiles hold 16 rows of 64 bytes.
//
// Included by processor.cpp only, where it is compiled for AVX-512 VNNI: the results are its own to the last
// bit, as sums of integers are exact. Few rows wait for their weights, and are left to it.
#pragma once

#include <immintrin.h>

#include "products.h"

namespace {

constexpr size_t kTileLines = 16, kTileQuads = 16;
constexpr size_t kLeastTileRows = 8;
static_assert(kPanel == 3 * kTileLines);

// Intel's manual, volume 1, section 18.3.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 2 are sums, 3 is that of rows, 4 to 6 are those of weights.
__attribute__((target("amx-tile,amx-int8"))) void add_tile_products(const uint8_t* rows,
                                                                    size_t row_stride,
                                                                    const int8_t* weights,
                                                                    size_t weight_stride) {
  _tile_loadd(3, rows, row_stride);
  _tile_loadd(4, weights, weight_stride);
  _tile_dpbusd(0, 3, 4);
  _tile_loadd(5, weights + kTileLines * kQuad, weight_stride);
  _tile_dpbusd(1, 3, 5);
  _tile_loadd(6, weights + 2 * kTileLines * kQuad, weight_stride);
  _tile_dpbusd(2, 3, 6);
}

// Products of at most kTileLines rows, which the tiles are configured for.
__attribute__((target("amx-tile,amx-int8"))) void multiply_tile_rows(
    const uint8_t* rows, size_t num_rows, const Panel& panel, const Prefetch& prefetch,
    const float* peaks, const Result& to) {
  // Every row begins with the corrections.
  _tile_loadd(0, panel.corrections, 0);
  _tile_loadd(1, panel.corrections + kTileLines, 0);
  _tile_loadd(2, panel.corrections + 2 * kTileLines, 0);
  constexpr size_t kWeightStride = kPanel * kQuad;
  const size_t row_stride = panel.num_quads * kQuad;
  const size_t num_steps = panel.num_quads / kTileQuads, rest = panel.num_quads % kTileQuads;
  const size_t lines = prefetch.lines_each(num_steps);
  const uint8_t* next = prefetch.bytes;
  const int8_t* weights = panel.weights;
  for (size_t step = 0; step < num_steps; ++step) {
    for (size_t line = 0; line < lines; ++line, next += kLine) __builtin_prefetch(next, 0, 2);
    add_tile_products(rows + step * kTileQuads * kQuad, row_stride, weights, kWeightStride);
    weights += kTileQuads * kWeightStride;
  }
  if (rest > 0) {  // filled up with zeros
    alignas(64) uint8_t last_rows[kTileLines * kTileQuads * kQuad] = {};
    alignas(64) int8_t last_weights[kTileQuads * kWeightStride] = {};
    for (size_t r = 0; r < num_rows; ++r) {
      std::memcpy(last_rows + r * kTileQuads * kQuad,
                  rows + r * row_stride + num_steps * kTileQuads * kQuad, rest * kQuad);
    }
    std::memcpy(last_weights, weights, rest * kWeightStride);
    add_tile_products(last_rows, kTileQuads * kQuad, last_weights, kWeightStride);
  }
  alignas(64) int32_t sums[kTileLines * kPanel];
  _tile_stored(0, sums, kPanel * sizeof(int32_t));
  _tile_stored(1, sums + kTileLines, kPanel * sizeof(int32_t));
  _tile_stored(2, sums + 2 * kTileLines, kPanel * sizeof(int32_t));
  finish_tile(sums, rows, num_rows, kPanel, panel, 0, peaks, to);
}

__attribute__((target("amx-tile,amx-int8"))) void multiply_tiles(const uint8_t* rows, size_t num_rows,
                                                                 const Panel& panel,
                                                                 const float* peaks,
                                                                 const Result& result) {
  if (num_rows < kLeastTileRows) return multiply<kPanel>(rows, num_rows, panel, peaks, result);
  const size_t tile_rows = rows_of_tiles(num_rows, kTileLines);
  TileShapes shapes;
  for (size_t tile = 0; tile < 7; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(tile < 4 ? tile_rows : kTileLines);
    shapes.row_bytes[tile] = kTileQuads * kQuad;
  }
  _tile_loadconfig(&shapes);
  Prefetch prefetch = {panel.prefetch.bytes, panel.prefetch.size * tile_rows / num_rows};
  for (size_t next = 0; next < num_rows; next += tile_rows, prefetch.bytes += prefetch.size) {
    // The last rows may be some that are known already, so that all tiles have one shape.
    const size_t row = next + tile_rows < num_rows ? next : num_rows - tile_rows;
    multiply_tile_rows(rows + row * panel.num_quads * kQuad, tile_rows, panel, prefetch,
                       peaks == nullptr ? nullptr : peaks + row, result.from(row));
  }
  _tile_release();  // a thread with tiles in use is slower to switch
}

}  // namespace
