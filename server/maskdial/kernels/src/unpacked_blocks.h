// Products of many rows and weights in blocks of 16, whose integers are made bytes once for all rows.
//
// Included by processor.cpp only: see vectors.h. The results are those of blocks.h to the last bit: sums of
// integers are exact, and the operations on floats are the same ones.
#pragma once

#include "blocks.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define UNPACKS_BLOCKS

namespace {

#if defined(__AVX512VNNI__)
inline Row plus(Row row, int byte) {
  return _mm512_add_epi8(row, _mm512_set1_epi8(static_cast<char>(byte)));
}
inline void store_row(uint8_t* p, Row row) { _mm512_storeu_si512(p, row); }
inline Sums to_sums(Floats integers) { return _mm512_cvtps_epi32(integers); }
#else
inline Row plus(Row row, int byte) {
  return _mm256_add_epi8(row, _mm256_set1_epi8(static_cast<char>(byte)));
}
inline void store_row(uint8_t* p, Row row) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), row);
}
inline Sums to_sums(Floats integers) { return _mm256_cvtps_epi32(integers); }
#endif

// So many blocks are unpacked at a time, which stay in the level-1 cache.
constexpr size_t kUnpackedBlocks = kNumbersAtOnce;
// The byte of a weight that is 0.
constexpr int kMiddleByte = 128;
// With fewer rows, unpacking takes longer than it saves.
constexpr size_t kLeastUnpackedRows = 24;
// Sums and totals of a tile stay in registers.
constexpr size_t kUnpackedVectors = 2;
constexpr size_t kUnpackedRows = kMaxSums / 2 / kUnpackedVectors;
static_assert(kPanel4 % (kUnpackedVectors * kWidth) == 0 && kMaxRows % kUnpackedRows == 0);

// Some blocks of a panel: bytes [block][quad][kPanel4][kQuad], and the columns' scales and minima.
struct UnpackedBlocks16 {
  alignas(64) uint8_t weights[kUnpackedBlocks][kHalfChunk / kQuad][kRowBytes];
  alignas(64) float scales[kUnpackedBlocks][kPanel4], minima[kUnpackedBlocks][kPanel4];
};

// Walks through a panel of half chunks.
template <BlockWeights kWeights, BlockNumbers kNumbers>
class BlockReader {
  static constexpr BlockForm kForm{kWeights, kNumbers};
  using Column = ColumnNumbers<kWeights, kNumbers>;
  static_assert(kForm.chunk_size() == kHalfChunk && !Column::kZeros);

 public:
  explicit BlockReader(const uint8_t* panel) : next_(panel) {}

  // Makes bytes of the next blocks' weights.
  void unpack(size_t count, UnpackedBlocks16& to) {
    for (size_t i = 0; i < count; ++i, ++block_) {
      if (are_multiples(kNumbers) && block_ % kForm.group_size() == 0) {
        group_ = next_;
        next_ += kForm.group_bytes();
      }
      if (kForm.pair_bytes() > 0 && block_ % 2 == 0) {
        pair_ = next_;
        next_ += kForm.pair_bytes();
      }
      const uint8_t* weights = next_;
      next_ += chunk_bytes_of(kWeights);
      const uint8_t* numbers = kForm.pair_bytes() > 0 ? pair_ + block_ % 2 * kPanel4 : next_;
      next_ += kForm.number_bytes();
      prefetch_block(weights, static_cast<size_t>(next_ - weights));
      UNROLL for (size_t first = 0; first < kPanel4; first += kWidth) {
        const Column column(numbers, group_, first);
        store(to.scales[i] + first, column.scale);
        if constexpr (Column::kMinima) store(to.minima[i] + first, column.other);
        UNROLL for (size_t quad = 0; quad < kHalfChunk / kQuad; ++quad) {
          const Row row = load_quad<kWeights>(weights + first * kQuad, quad);
          store_row(to.weights[i][quad] + first * kQuad, plus(row, kMiddleByte - kForm.zero()));
        }
      }
    }
  }

 private:
  const uint8_t *next_, *group_ = nullptr, *pair_ = nullptr;
  size_t block_ = 0;
};

// Numbers of rows in the blocks that are unpacked: where the sums of integers begin, and what they and the
// minima are multiplied by.
struct UnpackedNumbers {
  int32_t starts[kMaxRows][kUnpackedBlocks];
  float steps[kMaxRows][kUnpackedBlocks], minimum_steps[kMaxRows][kUnpackedBlocks];

  // kUnpackedBlocks numbers of the row are read, perhaps beyond its end.
  SHARED void set(size_t row, const float* row_steps, const float* sums) {
    for (size_t b = 0; b < kUnpackedBlocks; b += kWidth) {
      const Floats step = load(row_steps + b), sum = load(sums + b);
      store_sums(starts[row] + b, to_sums(mul(sum, splat(kMiddleByte))));
      store(steps[row] + b, step);
      store(minimum_steps[row] + b, mul(sum, step));
    }
  }
};

// A tile of kRows rows and kUnpackedVectors vectors of columns.
template <bool kMinima, size_t kRows>
[[gnu::noinline]] void add_unpacked_tile(const UnpackedBlocks16& blocks, size_t count,
                                         size_t first, const int8_t* values, size_t row_stride,
                                         const UnpackedNumbers& numbers, size_t row,
                                         float (*totals)[kPanel4]) {
  constexpr size_t kVectors = kUnpackedVectors;
  Floats total[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) total[r][v] = load(totals[r] + first + v * kWidth);
  }
  for (size_t b = 0; b < count; ++b, values += kHalfChunk) {
    Sums sums[kRows][kVectors];
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat_sum(numbers.starts[row + r][b]);
    }
    UNROLL for (size_t quad = 0; quad < kHalfChunk / kQuad; ++quad) {
      Row columns[kVectors];
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        columns[v] = load_row(blocks.weights[b][quad] + (first + v * kWidth) * kQuad);
      }
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, values + r * row_stride + quad * kQuad, sizeof(four));
        const Quads inputs = splat_signed_quad(four);
        UNROLL for (size_t v = 0; v < kVectors; ++v) {
          sums[r][v] = add_unsigned(sums[r][v], columns[v], inputs);
        }
      }
    }
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const Floats scale = load(blocks.scales[b] + first + v * kWidth);
      Floats minimum;
      if constexpr (kMinima) minimum = load(blocks.minima[b] + first + v * kWidth);
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        const Floats scaled = mul(to_floats(sums[r][v]), scale);
        total[r][v] = fma(scaled, splat(numbers.steps[row + r][b]), total[r][v]);
        if constexpr (kMinima) {
          total[r][v] = fma(minimum, splat(numbers.minimum_steps[row + r][b]), total[r][v]);
        }
      }
    }
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store(totals[r] + first + v * kWidth, total[r][v]);
  }
}

template <bool kMinima, size_t kRows>
void add_unpacked(const UnpackedBlocks16& blocks, size_t count, const int8_t* values,
                  size_t row_stride, const UnpackedNumbers& numbers, size_t row, size_t num_rows,
                  float (*totals)[kPanel4]) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_unpacked<kMinima, kRows - 1>(blocks, count, values, row_stride, numbers, row,
                                                     num_rows, totals);
    }
  }
  for (size_t first = 0; first < kPanel4; first += kUnpackedVectors * kWidth) {
    add_unpacked_tile<kMinima, kRows>(blocks, count, first, values, row_stride, numbers, row,
                                             totals);
  }
}

template <BlockWeights kWeights, BlockNumbers kNumbers>
void multiply_unpacked(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                       const Result& to) {
  const size_t row_stride = panel.num_chunks * kHalfChunk, num_blocks = panel.num_chunks;
  const size_t tile_rows = rows_of_tiles(num_rows, kUnpackedRows);
  UnpackedBlocks16 blocks;
  UnpackedNumbers numbers;
  alignas(64) float totals[kMaxRows][kPanel4];
  std::memset(totals, 0, num_rows * sizeof(totals[0]));
  BlockReader<kWeights, kNumbers> reader(panel.weights);
  for (size_t block = 0; block < num_blocks; block += kUnpackedBlocks) {
    const size_t left = num_blocks - block, count = left < kUnpackedBlocks ? left : kUnpackedBlocks;
    reader.unpack(count, blocks);
    for (size_t row = 0; row < num_rows; ++row) {
      const size_t at = row * num_blocks + block;
      numbers.set(row, rows.steps + at, rows.sums + at);
    }
    for (size_t row = 0; row < num_rows; row += tile_rows) {
      const size_t some = num_rows - row < tile_rows ? num_rows - row : tile_rows;
      add_unpacked<has_minima(kNumbers), kUnpackedRows>(
          blocks, count, rows.values + row * row_stride + block * kHalfChunk, row_stride, numbers, row, some,
          totals + row);
    }
  }
  finish_block_tile(totals[0], num_rows, kPanel4, panel, 0, to);
}

}  // namespace

#endif
