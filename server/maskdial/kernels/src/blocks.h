// Rows quantized in blocks, and their products with panels of weights of 4 or 8 bits.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "products.h"
#include "quantization.h"

namespace {

// Nibbles are 0 to 15, bytes -128 to 127 and inputs -127 to 127. A chunk's products of nibbles are added up
// in partial sums, which begin with the sums so far where those of many chunks fit. Products of bytes are
// those of a byte plus kByteOffset.
#if defined(__AVX512VNNI__)

using Partial = Sums;
using Nibbles = __m512i;
using Quads = __m512i;
inline Quads splat_signed_quad(int32_t quad) { return _mm512_set1_epi32(quad); }
inline Sums splat_sum(int32_t sum) { return _mm512_set1_epi32(sum); }
inline Nibbles low_nibbles(const uint8_t* p) {
  return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15));
}
inline Nibbles high_nibbles(const uint8_t* p) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
}
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_nibbles(Partial sums, Nibbles nibbles, Quads quads) {
  return _mm512_dpbusd_epi32(sums, nibbles, quads);
}
using Bytes = __m512i;
constexpr int kByteOffset = 128;
inline Bytes load_signed(const uint8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline Sums add_bytes(Sums sums, Bytes bytes, Quads quads) {
  return _mm512_dpbusd_epi32(sums, bytes, quads);
}
inline void store_signed_bytes(int8_t* p, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}

#elif defined(__AVX2__)

using Nibbles = __m256i;
using Quads = __m256i;
inline Quads splat_signed_quad(int32_t quad) { return _mm256_set1_epi32(quad); }
inline Sums splat_sum(int32_t sum) { return _mm256_set1_epi32(sum); }
inline Nibbles low_nibbles(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
}
inline Nibbles high_nibbles(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}
inline void store_signed_bytes(int8_t* p, Floats v) {
  const __m256i integers = _mm256_cvtps_epi32(v);
  const __m128i halves =
      _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
#if defined(__AVXVNNI__)
using Partial = Sums;
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_nibbles(Partial sums, Nibbles nibbles, Quads quads) {
  return _mm256_dpbusd_avx_epi32(sums, nibbles, quads);
}
using Bytes = __m256i;
constexpr int kByteOffset = 128;
inline Bytes load_signed(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
}
inline Sums add_bytes(Sums sums, Bytes bytes, Quads quads) {
  return _mm256_dpbusd_avx_epi32(sums, bytes, quads);
}
#else
// Sums of 16 bits: a pair of products is at most 2 * 15 * 127, and the kChunk / kQuad pairs of a
// chunk 30,480. So nothing saturates.
static_assert(kChunk / kQuad * 2 * 15 * 127 < 32768);
using Partial = __m256i;
inline Partial begin_chunk(Sums) { return _mm256_setzero_si256(); }
inline Partial add_partials(Partial a, Partial b) { return _mm256_add_epi16(a, b); }
inline Sums end_chunk(Partial pairs, Sums sums) {
  return add_sums(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Partial add_nibbles(Partial pairs, Nibbles nibbles, Quads quads) {
  pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(nibbles, quads));
  // Else g++ adds up a chunk's products as a tree, whose leaves do not fit the registers.
  asm("" : "+x"(pairs));
  return pairs;
}
// A pair of products is at most 2 * 128 * 127, which does not saturate.
struct Bytes {
  __m256i magnitudes, bytes;
};
constexpr int kByteOffset = 0;
inline Bytes load_signed(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_abs_epi8(bytes), bytes};
}
inline Sums add_bytes(Sums sums, const Bytes& bytes, Quads quads) {
  const __m256i signed_quads = _mm256_sign_epi8(quads, bytes.bytes);
  const __m256i pairs = _mm256_maddubs_epi16(bytes.magnitudes, signed_quads);
  return add_sums(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#elif defined(NEON)

using Partial = Sums;
using Nibbles = Weights;
using Quads = Inputs;
inline Quads splat_signed_quad(int32_t quad) { return vreinterpretq_s8_s32(vdupq_n_s32(quad)); }
inline Sums splat_sum(int32_t sum) { return vdupq_n_s32(sum); }
inline Nibbles low_nibbles(const uint8_t* p) {
  return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
inline Nibbles high_nibbles(const uint8_t* p) {
  return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
}
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_nibbles(Partial sums, Nibbles nibbles, Quads quads) {
  return add_products(sums, quads, nibbles);
}
using Bytes = Weights;
constexpr int kByteOffset = 0;
inline Bytes load_signed(const uint8_t* p) { return vld1q_s8(reinterpret_cast<const int8_t*>(p)); }
inline Sums add_bytes(Sums sums, Bytes bytes, Quads quads) {
  return add_products(sums, quads, bytes);
}
inline void store_signed_bytes(int8_t* p, Floats v) { store_low_bytes(p, vcvtnq_s32_f32(v)); }

#else

using Partial = Sums;
inline Sums splat_sum(int32_t sum) { return sum; }
struct Nibbles {
  const uint8_t* bytes;
  int shift;
};
using Quads = int32_t;
inline Quads splat_signed_quad(int32_t quad) { return quad; }
inline Nibbles low_nibbles(const uint8_t* p) { return {p, 0}; }
inline Nibbles high_nibbles(const uint8_t* p) { return {p, 4}; }
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return a + b; }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_nibbles(Partial sums, Nibbles nibbles, Quads quads) {
  for (size_t i = 0; i < kQuad; ++i) {
    const auto input = static_cast<int8_t>(quads >> (8 * i) & 0xff);
    sums += (nibbles.bytes[i] >> nibbles.shift & 15) * input;
  }
  return sums;
}
using Bytes = const uint8_t*;
constexpr int kByteOffset = 0;
inline Bytes load_signed(const uint8_t* p) { return p; }
inline Sums add_bytes(Sums sums, Bytes bytes, Quads quads) {
  for (size_t i = 0; i < kQuad; ++i) {
    sums += static_cast<int8_t>(bytes[i]) * static_cast<int8_t>(quads >> (8 * i) & 0xff);
  }
  return sums;
}
inline void store_signed_bytes(int8_t* p, Floats v) { *p = static_cast<int8_t>(std::nearbyintf(v)); }

#endif

// The bytes of a quad of columns hold this many inputs.
constexpr size_t kOctet = 2 * kQuad;
// A panel is a few kilobytes, too short for the processor to foresee the next one. The last one is
// followed by memory that is not the matrix's: a prefetch of it does nothing. Lines go to the level-2 cache:
// more of them can be on their way to it.
constexpr size_t kBlockPrefetched = 4096;
inline void prefetch_block(const uint8_t* weights, size_t size) {
  for (size_t byte = 0; byte < size; byte += kLine) {
    __builtin_prefetch(weights + kBlockPrefetched + byte, 0, 2);
  }
}

// How a panel holds its weights.
enum class BlockWeights { kNibbles, kBytes, kBytesInHalfChunks };
constexpr size_t chunk_size_of(BlockWeights weights) {
  return weights == BlockWeights::kBytesInHalfChunks ? kHalfChunk : kChunk;
}
constexpr size_t chunk_bytes_of(BlockWeights weights) {
  const size_t size = chunk_size_of(weights) * kPanel4;
  return weights == BlockWeights::kNibbles ? size / 2 : size;
}

inline void store_some_signed_bytes(int8_t* p, Floats v, size_t count) {
  if (count == kWidth) return store_signed_bytes(p, v);
  int8_t copy[kWidth];
  store_signed_bytes(copy, v);
  std::memcpy(p, copy, count);
}

// Blocks of smaller magnitudes count as zeros: 127 / magnitude must be finite.
constexpr float kMinBlockMagnitude = 0x1p-120f;

void quantize_blocks(const float* row, size_t size, size_t block_size, int8_t* values,
                     float* steps, float* sums) {
  const Floats highest = splat(kLargestInput), lowest = splat(-kLargestInput);
  for (size_t first = 0, b = 0; first < size; first += block_size, ++b) {
    const float* block = row + first;
    const size_t length = size - first < block_size ? size - first : block_size;
    const float peak = largest_magnitude(block, length);
    const bool counts = peak >= kMinBlockMagnitude;
    steps[b] = counts ? peak / kLargestInput : 0.0f;
    const Floats factor = splat(counts ? kLargestInput / peak : 0.0f);
    Floats sum = splat(0.0f);  // of integers, which are exact in any order
    for_each_vector(length, [&](size_t i, size_t count) {
      const Floats scaled = mul(load_some(block + i, count), factor);
      // NaN becomes the minimum.
      const Floats integers = min(max(round(scaled), lowest), highest);
      sum = add(sum, integers);
      store_some_signed_bytes(values + first + i, integers, count);
    });
    sums[b] = -sum_of_lanes(sum);
  }
}

// Adds the products of kRows rows and kVectors vectors of columns in a chunk of nibbles. With kForeseen,
// the hardware prefetches the weights.
template <bool kForeseen, size_t kRows, size_t kVectors>
inline void add_nibble_chunk(const uint8_t* weights, const int8_t* values, size_t row_stride,
                      Sums (&sums)[kRows][kVectors]) {
  // Few sums would wait for each other, so there are more: integers add up in any order.
  constexpr size_t kChains = kRows * kVectors <= 4 ? 2 : 1;
  Partial partials[kChains][kRows][kVectors];
  UNROLL for (size_t c = 0; c < kChains; ++c) {
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        partials[c][r][v] = begin_chunk(c == 0 ? sums[r][v] : splat_sum(0));
      }
    }
  }
  UNROLL for (size_t octet = 0; octet < kChunk / kOctet; ++octet) {
    if (!kForeseen) prefetch_block(weights, kVectors * kWidth * kQuad);
    UNROLL for (size_t half = 0; half < 2; ++half) {
      Nibbles nibbles[kVectors];
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        const uint8_t* bytes = weights + v * kWidth * kQuad;
        nibbles[v] = half == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
      }
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        int32_t quad;
        std::memcpy(&quad, values + r * row_stride + half * kQuad, sizeof(quad));
        const Quads quads = splat_signed_quad(quad);
        UNROLL for (size_t v = 0; v < kVectors; ++v) {
          Partial& sum = partials[half % kChains][r][v];
          sum = add_nibbles(sum, nibbles[v], quads);
        }
      }
    }
    weights += kPanel4 * kQuad;
    values += kOctet;
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      Partial sum = partials[0][r][v];
      if constexpr (kChains > 1) sum = add_partials(sum, partials[1][r][v]);
      sums[r][v] = end_chunk(sum, sums[r][v]);
    }
  }
}

// The same for a chunk of kSize bytes.
template <size_t kSize, bool kForeseen, size_t kRows, size_t kVectors>
inline void add_byte_chunk(const uint8_t* weights, const int8_t* values, size_t row_stride,
                           Sums (&sums)[kRows][kVectors]) {
  constexpr size_t kChains = kRows * kVectors <= 4 ? 2 : 1;
  Sums partials[kChains][kRows][kVectors];
  UNROLL for (size_t c = 0; c < kChains; ++c) {
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        partials[c][r][v] = c == 0 ? sums[r][v] : splat_sum(0);
      }
    }
  }
  UNROLL for (size_t q = 0; q < kSize / kQuad; ++q) {
    if (!kForeseen) prefetch_block(weights, kVectors * kWidth * kQuad);
    Bytes bytes[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      bytes[v] = load_signed(weights + v * kWidth * kQuad);
    }
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      int32_t quad;
      std::memcpy(&quad, values + r * row_stride, sizeof(quad));
      const Quads quads = splat_signed_quad(quad);
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        Sums& sum = partials[q % kChains][r][v];
        sum = add_bytes(sum, bytes[v], quads);
      }
    }
    weights += kPanel4 * kQuad;
    values += kQuad;
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = partials[0][r][v];
      if constexpr (kChains > 1) sums[r][v] = add_sums(sums[r][v], partials[1][r][v]);
    }
  }
}

// The numbers of a block for a vector of columns. The sums of bytes have kByteOffset in each.
template <BlockWeights kWeights, BlockNumbers kNumbers>
struct ColumnNumbers {
  static constexpr bool kZeros =
      kNumbers == BlockNumbers::kFloatZero || kNumbers == BlockNumbers::kHalfZero;
  static constexpr bool kMinima =
      kNumbers == BlockNumbers::kFloatMinimum || kNumbers == BlockNumbers::kByteMinimum;
  Floats scale, other;

  ColumnNumbers(const uint8_t* block, const uint8_t* group, size_t column) {
    if constexpr (group_bytes_per_column(kNumbers) > 0) {
      const auto* steps = reinterpret_cast<const float*>(group);
      scale = mul(load_bytes(block + column), load(steps + column));
      if constexpr (kMinima) {
        other = mul(load_bytes(block + kPanel4 + column), load(steps + kPanel4 + column));
      }
    } else if constexpr (kNumbers == BlockNumbers::kHalfZero || kNumbers == BlockNumbers::kHalf) {
      scale = load_halves(reinterpret_cast<const uint16_t*>(block) + column);
      if constexpr (kZeros) other = load_bytes(block + kPanel4 * sizeof(uint16_t) + column);
    } else {
      const auto* scales = reinterpret_cast<const float*>(block);
      scale = load(scales + column);
      if constexpr (kZeros) other = load_bytes(block + kPanel4 * sizeof(float) + column);
      if constexpr (kMinima) other = load(scales + kPanel4 + column);
    }
  }

  // Adds a block's part of a product, whose integers' sum is `sum`.
  Floats add(Sums sum, float step, float row_sum, Floats total) const {
    Floats integers = to_floats(sum);  // exact, as are the products with sums of rows
    if constexpr (kZeros) integers = fma(other, splat(row_sum), integers);
    if constexpr (kWeights != BlockWeights::kNibbles && kByteOffset != 0) {
      integers = fma(splat(float{kByteOffset}), splat(row_sum), integers);
    }
    total = fma(mul(integers, scale), splat(step), total);
    if constexpr (kMinima) total = fma(other, splat(row_sum * step), total);
    return total;
  }
};

// The results of a tile's totals [num_rows][num_columns].
void finish_block_tile(const float* totals, size_t num_rows, size_t num_columns,
                       const BlockPanel& panel, size_t first, const Result& to) {
  const size_t last = first + num_columns < to.num_columns ? first + num_columns : to.num_columns;
  for (size_t r = 0; r < num_rows; ++r, totals += num_columns) {
    for (size_t column = first; column < last; column += kWidth) {
      Floats product = load(totals + column - first);
      if (panel.biases != nullptr) product = add(product, load(panel.biases + column));
      put(to, r, column, product);
    }
  }
}

// A tile of kRows rows and kVectors vectors of columns. Most blocks are a single chunk each (kSingle):
// without a loop over chunks, more sums and totals stay in registers.
template <BlockWeights kWeights, BlockNumbers kNumbers, size_t kRows, size_t kVectors, bool kSingle,
          bool kForeseen>
void multiply_block_tile(const BlockRows& rows, size_t row, const BlockPanel& panel, size_t first,
                         const Result& to) {
  constexpr size_t kSize = chunk_size_of(kWeights);
  const size_t row_stride = panel.num_chunks * kSize, num_blocks = panel.num_blocks();
  const uint8_t* weights = panel.weights + first * kQuad;
  const int8_t* values = rows.values + row * row_stride;
  const float* steps = rows.steps + row * num_blocks;
  const float* row_sums = rows.sums + row * num_blocks;
  Floats totals[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) totals[r][v] = splat(0.0f);
  }
  const uint8_t* group = nullptr;
  for (size_t block = 0, chunk = 0; block < num_blocks; ++block) {
    if (group_bytes_per_column(kNumbers) > 0 && block % kBlockGroup == 0) {
      group = weights - first * kQuad;
      weights += kPanel4 * group_bytes_per_column(kNumbers);
    }
    Sums sums[kRows][kVectors];
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat_sum(0);
    }
    const size_t left = panel.num_chunks - chunk;
    const size_t end = chunk + (left < panel.chunks_per_block ? left : panel.chunks_per_block);
    do {
      if constexpr (kWeights == BlockWeights::kNibbles) {
        add_nibble_chunk<kForeseen>(weights, values, row_stride, sums);
      } else {
        add_byte_chunk<kSize, kForeseen>(weights, values, row_stride, sums);
      }
      weights += chunk_bytes_of(kWeights);
      values += kSize;
    } while (++chunk < end && !kSingle);
    const uint8_t* numbers = weights - first * kQuad;
    if (!kForeseen) prefetch_block(numbers, kPanel4 * bytes_per_column(kNumbers));
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const ColumnNumbers<kWeights, kNumbers> column(numbers, group, first + v * kWidth);
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        const size_t at = r * num_blocks + block;
        totals[r][v] = column.add(sums[r][v], steps[at], row_sums[at], totals[r][v]);
      }
    }
    weights += kPanel4 * bytes_per_column(kNumbers);
  }
  // Loops over registers end here: later code reads the totals from memory.
  float results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store(results[r] + v * kWidth, totals[r][v]);
  }
  finish_block_tile(results[0], kRows, kVectors * kWidth, panel, first, to);
}

template <BlockWeights kWeights, BlockNumbers kNumbers, size_t kRows>
void multiply_block_rows(const BlockRows& rows, size_t row, size_t num_rows,
                         const BlockPanel& panel, const Result& to) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_block_rows<kWeights, kNumbers, kRows - 1>(rows, row, num_rows, panel, to);
    }
  }
  constexpr size_t kVectors = kVectorsOf<kPanel4, kRows>;
  // One row waits for its weights, as in multiply_rows.
  constexpr bool kMayForesee = kRows == 1;
  // Blocks of bytes are single chunks.
  constexpr bool kOnlySingle = kWeights != BlockWeights::kNibbles;
  auto multiply_tile = multiply_block_tile<kWeights, kNumbers, kRows, kVectors, kOnlySingle, false>;
  if (kOnlySingle || panel.chunks_per_block == 1) {
    multiply_tile = multiply_block_tile<kWeights, kNumbers, kRows, kVectors, true, false>;
    if (kMayForesee && kHardwarePrefetches) {
      multiply_tile = multiply_block_tile<kWeights, kNumbers, kRows, kVectors, true, kMayForesee>;
    }
  } else if (kMayForesee && kHardwarePrefetches) {
    multiply_tile =
        multiply_block_tile<kWeights, kNumbers, kRows, kVectors, kOnlySingle, kMayForesee>;
  }
  for (size_t first = 0; first < to.num_columns; first += kVectors * kWidth) {
    multiply_tile(rows, row, panel, first, to);
  }
}

// The rows are not copied from one tile to the next: a load of two pointers that were stored one by
// one waits until all stores before them, which are the products', have reached the cache.
template <BlockWeights kWeights, BlockNumbers kNumbers>
void multiply_all_blocks(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                         const Result& result) {
  const size_t tile_rows = rows_of_tiles(num_rows, kTileRows<kPanel4>);
  for (size_t row = 0; row < num_rows; row += tile_rows) {
    const size_t some = num_rows - row < tile_rows ? num_rows - row : tile_rows;
    multiply_block_rows<kWeights, kNumbers, kTileRows<kPanel4>>(rows, row, some, panel,
                                                                result.from(row));
  }
}

template <BlockWeights kWeights>
void multiply_bytes(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                    const Result& result) {
  switch (panel.numbers) {
    case BlockNumbers::kHalf:
      return multiply_all_blocks<kWeights, BlockNumbers::kHalf>(rows, num_rows, panel, result);
    case BlockNumbers::kByte:
      return multiply_all_blocks<kWeights, BlockNumbers::kByte>(rows, num_rows, panel, result);
    case BlockNumbers::kByteMinimum:
      return multiply_all_blocks<kWeights, BlockNumbers::kByteMinimum>(rows, num_rows, panel, result);
    case BlockNumbers::kFloatMinimum:
      return multiply_all_blocks<kWeights, BlockNumbers::kFloatMinimum>(rows, num_rows, panel, result);
    default:
      return multiply_all_blocks<kWeights, BlockNumbers::kFloat>(rows, num_rows, panel, result);
  }
}

void multiply_blocks(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                     const Result& result) {
  constexpr BlockWeights kNibbles = BlockWeights::kNibbles;
  if (panel.bits == 8) {
    if (panel.chunk_size == kChunk) {
      return multiply_bytes<BlockWeights::kBytes>(rows, num_rows, panel, result);
    }
    return multiply_bytes<BlockWeights::kBytesInHalfChunks>(rows, num_rows, panel, result);
  }
  switch (panel.numbers) {
    case BlockNumbers::kHalfZero:
      return multiply_all_blocks<kNibbles, BlockNumbers::kHalfZero>(rows, num_rows, panel, result);
    case BlockNumbers::kFloatMinimum:
      return multiply_all_blocks<kNibbles, BlockNumbers::kFloatMinimum>(rows, num_rows, panel, result);
    case BlockNumbers::kByteMinimum:
      return multiply_all_blocks<kNibbles, BlockNumbers::kByteMinimum>(rows, num_rows, panel, result);
    default:
      return multiply_all_blocks<kNibbles, BlockNumbers::kFloatZero>(rows, num_rows, panel, result);
  }
}

}  // namespace
