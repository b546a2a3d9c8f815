// Products of rows and 4-bit weights in blocks of 32 by AMX.
//
// Included by processor.cpp only, where it is compiled for AVX-512 VNNI: the results are its own to the last
// bit, as sums of integers are exact. A tile's sums are those of one block, which are scaled and added up as floats.
#pragma once

#include "block_products.h"
#include "tiles.h"

namespace {

// Weights are unpacked, and sums kept, for this many blocks at a time.
constexpr size_t kTileBlocks = 4;
constexpr size_t kBlockTiles = kPanel4 / kTileLines;
constexpr size_t kLeastBlockTileRows = 32;
static_assert(kBlockTiles == 2 && kTileLines == kWidth);

// Some blocks of a panel, as the tiles read them: weights with a sign [block][tile][quad][kTileLines][kQuad],
// and the columns' scales and minima.
struct UnpackedBlocks {
  alignas(64) int8_t weights[kTileBlocks][kBlockTiles][kChunk / kQuad][kTileLines * kQuad];
  alignas(64) float scales[kTileBlocks][kPanel4], minima[kTileBlocks][kPanel4];
};

// Four copies of an integer below 256, in the bytes of its lane.
inline __m512i splat_in_lanes(Floats integers) {
  const __m512i lowest = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  return _mm512_shuffle_epi8(_mm512_cvtps_epi32(integers), lowest);
}

template <BlockNumbers kNumbers>
inline void unpack_block(const uint8_t* weights, const uint8_t* group, size_t block, UnpackedBlocks& to) {
  constexpr BlockWeights kNibbles = BlockWeights::kNibbles;
  using Column = ColumnNumbers<kNibbles, kNumbers>;
  UNROLL for (size_t v = 0; v < kBlockTiles; ++v) {
    const Column column(weights + chunk_bytes_of(kNibbles), group, v * kWidth);
    store(to.scales[block] + v * kWidth, column.scale);
    if constexpr (Column::kMinima) store(to.minima[block] + v * kWidth, column.other);
    __m512i zeros = _mm512_setzero_si512();
    if constexpr (Column::kZeros) zeros = splat_in_lanes(column.other);
    auto& quads = to.weights[block][v];
    const uint8_t* bytes = weights + v * kWidth * kQuad;
    UNROLL for (size_t quad = 0; quad < kChunk / kQuad; ++quad) {
      _mm512_store_si512(quads[quad], _mm512_sub_epi8(load_quad<kNibbles>(bytes, quad), zeros));
    }
  }
}

// The sums of a block [row][kPanel4]. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights; blocks take turns.
#define ADD_BLOCK(first, second, rows)                                  \
  _tile_zero(first);                                                    \
  _tile_zero(second);                                                   \
  _tile_loadd(rows, values, row_stride);                                \
  _tile_loadd(6, weights[0], kTileLines* kQuad);                        \
  _tile_dpbssd(first, rows, 6);                                         \
  _tile_loadd(7, weights[1], kTileLines* kQuad);                        \
  _tile_dpbssd(second, rows, 7);                                        \
  _tile_stored(first, sums, kPanel4 * sizeof(int32_t));                 \
  _tile_stored(second, sums + kTileLines, kPanel4 * sizeof(int32_t))

__attribute__((target("amx-tile,amx-int8"))) inline void add_block(
    bool odd, const int8_t* values, size_t row_stride,
    const int8_t (&weights)[kBlockTiles][kChunk / kQuad][kTileLines * kQuad], int32_t* sums) {
  if (odd) {
    ADD_BLOCK(2, 3, 5);
  } else {
    ADD_BLOCK(0, 1, 4);
  }
}
#undef ADD_BLOCK

template <BlockNumbers kNumbers>
__attribute__((target("amx-tile,amx-int8"))) void multiply_block_tiles(const BlockRows& rows,
                                                                       size_t num_rows,
                                                                       const BlockPanel& panel,
                                                                       const Result& to) {
  constexpr BlockForm kForm{BlockWeights::kNibbles, kNumbers};
  static_assert(kForm.group_size() % kTileBlocks == 0 && kNumbers != BlockNumbers::kByte);
  constexpr size_t kBytes = chunk_bytes_of(kForm.weights) + kForm.number_bytes();
  constexpr bool kMinima = has_minima(kNumbers);
  const size_t tile_rows = rows_of_tiles(num_rows, kTileLines);
  TileShapes shapes;
  for (size_t tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? tile_rows : kChunk / kQuad);
    shapes.row_bytes[tile] = tile == 4 || tile == 5 ? kChunk : kTileLines * kQuad;
  }
  _tile_loadconfig(&shapes);
  const size_t row_stride = panel.num_chunks * kChunk, num_blocks = panel.num_chunks;
  alignas(64) float totals[kMaxRows][kPanel4];
  std::memset(totals, 0, num_rows * sizeof(totals[0]));
  alignas(64) int32_t sums[kTileBlocks][kTileLines][kPanel4];
  UnpackedBlocks unpacked;
  const uint8_t *weights = panel.weights, *group = nullptr;
  for (size_t first = 0; first < num_blocks; first += kTileBlocks) {
    const size_t count = num_blocks - first < kTileBlocks ? num_blocks - first : kTileBlocks;
    if (are_multiples(kNumbers) && first % kForm.group_size() == 0) {
      group = weights;
      weights += kForm.group_bytes();
    }
    for (size_t b = 0; b < count; ++b, weights += kBytes) {
      prefetch_block(weights, kBytes);
      unpack_block<kNumbers>(weights, group, b, unpacked);
    }
    for (size_t next = 0; next < num_rows; next += tile_rows) {
      // The last rows may be some that are added already, so that all tiles have one shape.
      const size_t row = next + tile_rows < num_rows ? next : num_rows - tile_rows;
      const int8_t* values = rows.values + row * row_stride + first * kChunk;
      for (size_t b = 0; b < count; ++b, values += kChunk) {
        add_block(b % 2 != 0, values, row_stride, unpacked.weights[b], sums[b][0]);
      }
      for (size_t r = next; r < row + tile_rows; ++r) {
        const size_t at = r * num_blocks + first;
        Floats total[kBlockTiles];
        UNROLL for (size_t v = 0; v < kBlockTiles; ++v) total[v] = load(totals[r] + v * kWidth);
        for (size_t b = 0; b < count; ++b) {
          const float step = rows.steps[at + b];
          UNROLL for (size_t v = 0; v < kBlockTiles; ++v) {
            const Floats integers = to_floats(load_sums(sums[b][r - row] + v * kWidth));
            const Floats scaled = mul(integers, load(unpacked.scales[b] + v * kWidth));
            total[v] = fma(scaled, splat(step), total[v]);
            if constexpr (kMinima) {
              const Floats minima = load(unpacked.minima[b] + v * kWidth);
              total[v] = fma(minima, splat(rows.sums[at + b] * step), total[v]);
            }
          }
        }
        UNROLL for (size_t v = 0; v < kBlockTiles; ++v) store(totals[r] + v * kWidth, total[v]);
      }
    }
  }
  _tile_release();  // a thread with tiles in use is slower to switch
  finish_block_tile(totals[0], num_rows, kPanel4, panel, 0, to);
}

void multiply_blocks_by_tiles(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                              const Result& result) {
  if (panel.form.weights != BlockWeights::kNibbles || panel.chunks_per_block > 1 ||
      num_rows < kLeastBlockTileRows) {
    return multiply_blocks(rows, num_rows, panel, result);
  }
  switch (panel.form.numbers) {
    case BlockNumbers::kHalfZero:
      return multiply_block_tiles<BlockNumbers::kHalfZero>(rows, num_rows, panel, result);
    case BlockNumbers::kFloatMinimum:
      return multiply_block_tiles<BlockNumbers::kFloatMinimum>(rows, num_rows, panel, result);
    case BlockNumbers::kHalfMinimum:
      return multiply_block_tiles<BlockNumbers::kHalfMinimum>(rows, num_rows, panel, result);
    case BlockNumbers::kByteMinimum:
      return multiply_block_tiles<BlockNumbers::kByteMinimum>(rows, num_rows, panel, result);
    default:
      return multiply_block_tiles<BlockNumbers::kFloatZero>(rows, num_rows, panel, result);
  }
}

}  // namespace
