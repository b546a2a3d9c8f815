// Rows quantized in blocks, and their products with panels of weights of 4 to 8 bits.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "products.h"
#include "quantization.h"

namespace {

// Weights of less than 8 bits have no sign, bytes are -128 to 127 and inputs -127 to 127. Products of the
// former are added up in partial sums of at most kLargestPartial, which begin with the sums so far where those
// of many chunks fit. Products of bytes are those of a byte plus kByteOffset.
//
// Rows of a panel are shifted to the right, across the borders of bytes.
#if defined(__AVX512VNNI__)

using Partial = Sums;
using Row = __m512i;
using Quads = __m512i;
inline Quads splat_signed_quad(int32_t quad) { return _mm512_set1_epi32(quad); }
inline Sums splat_sum(int32_t sum) { return _mm512_set1_epi32(sum); }
inline Row load_row(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Row shifted(Row row, int bits) {
  using Words __attribute__((vector_size(64))) = uint16_t;
  return reinterpret_cast<Row>(reinterpret_cast<Words>(row) >> bits);
}
inline Row masked(Row row, uint8_t bits) {
  return _mm512_and_si512(row, _mm512_set1_epi8(static_cast<char>(bits)));
}
inline Row either(Row a, Row b) { return _mm512_or_si512(a, b); }
constexpr int kLargestPartial = INT32_MAX;
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_unsigned(Partial sums, Row weights, Quads quads) {
  return _mm512_dpbusd_epi32(sums, weights, quads);
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

using Row = __m256i;
using Quads = __m256i;
inline Quads splat_signed_quad(int32_t quad) { return _mm256_set1_epi32(quad); }
inline Sums splat_sum(int32_t sum) { return _mm256_set1_epi32(sum); }
inline Row load_row(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Row shifted(Row row, int bits) {
  using Words __attribute__((vector_size(32))) = uint16_t;
  return reinterpret_cast<Row>(reinterpret_cast<Words>(row) >> bits);
}
inline Row masked(Row row, uint8_t bits) {
  return _mm256_and_si256(row, _mm256_set1_epi8(static_cast<char>(bits)));
}
inline Row either(Row a, Row b) { return _mm256_or_si256(a, b); }
inline void store_signed_bytes(int8_t* p, Floats v) {
  const __m256i integers = _mm256_cvtps_epi32(v);
  const __m128i halves =
      _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
#if defined(__AVXVNNI__)
using Partial = Sums;
constexpr int kLargestPartial = INT32_MAX;
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_unsigned(Partial sums, Row weights, Quads quads) {
  return _mm256_dpbusd_avx_epi32(sums, weights, quads);
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
// Sums of 16 bits, of pairs of products.
using Partial = __m256i;
constexpr int kLargestPartial = INT16_MAX;
inline Partial begin_chunk(Sums) { return _mm256_setzero_si256(); }
inline Partial add_partials(Partial a, Partial b) { return _mm256_add_epi16(a, b); }
inline Sums end_chunk(Partial pairs, Sums sums) {
  return add_sums(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Partial add_unsigned(Partial pairs, Row weights, Quads quads) {
  pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights, quads));
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
using Row = uint8x16_t;
using Quads = Inputs;
inline Quads splat_signed_quad(int32_t quad) { return vreinterpretq_s8_s32(vdupq_n_s32(quad)); }
inline Sums splat_sum(int32_t sum) { return vdupq_n_s32(sum); }
inline Row load_row(const uint8_t* p) { return vld1q_u8(p); }
inline Row shifted(Row row, int bits) { return row >> bits; }
inline Row masked(Row row, uint8_t bits) { return vandq_u8(row, vdupq_n_u8(bits)); }
inline Row either(Row a, Row b) { return vorrq_u8(a, b); }
constexpr int kLargestPartial = INT32_MAX;
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return add_sums(a, b); }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_unsigned(Partial sums, Row weights, Quads quads) {
  return add_products(sums, quads, vreinterpretq_s8_u8(weights));
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
using Row = uint32_t;
using Quads = int32_t;
inline Quads splat_signed_quad(int32_t quad) { return quad; }
inline Row load_row(const uint8_t* p) {
  Row row;
  std::memcpy(&row, p, sizeof(row));
  return row;
}
inline Row shifted(Row row, int bits) { return row >> bits; }
inline Row masked(Row row, uint8_t bits) { return row & bits * 0x01010101u; }
inline Row either(Row a, Row b) { return a | b; }
constexpr int kLargestPartial = INT32_MAX;
inline Partial begin_chunk(Sums sums) { return sums; }
inline Partial add_partials(Partial a, Partial b) { return a + b; }
inline Sums end_chunk(Partial partials, Sums) { return partials; }
inline Partial add_unsigned(Partial sums, Row weights, Quads quads) {
  for (size_t i = 0; i < kQuad; ++i) {
    const auto weight = static_cast<uint8_t>(weights >> (8 * i) & 0xff);
    sums += weight * static_cast<int8_t>(quads >> (8 * i) & 0xff);
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

// A panel is a few kilobytes, too short for the processor to foresee the next one. The last one is
// followed by memory that is not the matrix's: a prefetch of it does nothing. Lines go to the level-2 cache:
// more of them can be on their way to it.
constexpr size_t kBlockPrefetched = 4096;
inline void prefetch_block(const uint8_t* weights, size_t size) {
  for (size_t byte = 0; byte < size; byte += kLine) {
    __builtin_prefetch(weights + kBlockPrefetched + byte, 0, 2);
  }
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

constexpr bool has_bytes(BlockWeights weights) {
  return weights == BlockWeights::kBytes || weights == BlockWeights::kHalfBytes;
}

// A quad of weights, for the columns at which `chunk` begins.
template <BlockWeights kWeights>
inline Row load_quad(const uint8_t* chunk, size_t quad) {
  const auto bits = [&](size_t row, int right, uint8_t mask) {
    return masked(shifted(load_row(chunk + row * kRowBytes), right), mask);
  };
  if constexpr (has_bytes(kWeights)) {
    return load_row(chunk + quad * kRowBytes);
  } else if constexpr (kWeights == BlockWeights::kNibbles) {
    return quad % 2 == 0 ? masked(load_row(chunk + quad / 2 * kRowBytes), 15) : bits(quad / 2, 4, 15);
  } else if constexpr (kWeights == BlockWeights::kFives) {
    if (quad < 5) return masked(load_row(chunk + quad * kRowBytes), 31);
    if (quad == 5) return either(bits(0, 5, 7), bits(1, 2, 24));
    if (quad == 6) return either(either(bits(1, 7, 1), bits(2, 4, 14)), bits(3, 1, 16));
    return either(bits(3, 6, 3), bits(4, 3, 28));
  } else {
    if (quad < 3) return masked(load_row(chunk + quad * kRowBytes), 63);
    return either(either(bits(0, 6, 3), bits(1, 4, 12)), bits(2, 2, 48));
  }
}

// The quads whose products with a weight fit a partial sum, which are a chunk or a part of it.
template <BlockWeights kWeights>
constexpr size_t quads_of_partial() {
  constexpr int kLargest = kWeights == BlockWeights::kNibbles ? 15
                           : kWeights == BlockWeights::kFives ? 31
                                                              : 63;
  constexpr size_t kQuads = chunk_size_of(kWeights) / kQuad;
  constexpr size_t kFitting = kLargestPartial / (2 * kLargest * static_cast<int>(kLargestInput));
  return kFitting < kQuads ? kFitting : kQuads;
}

// Adds the products of kRows rows and kVectors vectors of columns in a chunk of less than 8 bits.
template <BlockWeights kWeights, size_t kRows, size_t kVectors>
inline void add_chunk(const uint8_t* weights, const int8_t* values, size_t row_stride,
                      Sums (&sums)[kRows][kVectors]) {
  constexpr size_t kQuads = chunk_size_of(kWeights) / kQuad;
  constexpr size_t kPart = quads_of_partial<kWeights>();
  static_assert(kQuads % kPart == 0);
  // Few sums would wait for each other, so there are more: integers add up in any order.
  constexpr size_t kChains = kRows * kVectors <= 4 ? 2 : 1;
  const auto row_of = [](size_t quad) { return quad * rows_of_chunk(kWeights) / kQuads; };
  UNROLL for (size_t part = 0; part < kQuads; part += kPart) {
    Partial partials[kChains][kRows][kVectors];
    UNROLL for (size_t c = 0; c < kChains; ++c) {
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        UNROLL for (size_t v = 0; v < kVectors; ++v) {
          partials[c][r][v] = begin_chunk(c == 0 ? sums[r][v] : splat_sum(0));
        }
      }
    }
    UNROLL for (size_t quad = part; quad < part + kPart; ++quad) {
      if (quad == 0 || row_of(quad) != row_of(quad - 1)) {
        prefetch_block(weights + row_of(quad) * kRowBytes, kVectors * kWidth * kQuad);
      }
      Row columns[kVectors];
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        columns[v] = load_quad<kWeights>(weights + v * kWidth * kQuad, quad);
      }
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, values + r * row_stride + quad * kQuad, sizeof(four));
        const Quads inputs = splat_signed_quad(four);
        UNROLL for (size_t v = 0; v < kVectors; ++v) {
          Partial& sum = partials[quad % kChains][r][v];
          sum = add_unsigned(sum, columns[v], inputs);
        }
      }
    }
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        Partial sum = partials[0][r][v];
        if constexpr (kChains > 1) sum = add_partials(sum, partials[1][r][v]);
        sums[r][v] = end_chunk(sum, sums[r][v]);
      }
    }
  }
}

// The same for a chunk of kSize bytes.
template <size_t kSize, size_t kRows, size_t kVectors>
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
    prefetch_block(weights, kVectors * kWidth * kQuad);
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
    weights += kRowBytes;
    values += kQuad;
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = partials[0][r][v];
      if constexpr (kChains > 1) sums[r][v] = add_sums(sums[r][v], partials[1][r][v]);
    }
  }
}

// The numbers of a block for a vector of columns; `group` are those of its group.
template <BlockWeights kWeights, BlockNumbers kNumbers>
struct ColumnNumbers {
  static constexpr bool kZeros =
      kNumbers == BlockNumbers::kFloatZero || kNumbers == BlockNumbers::kHalfZero;
  static constexpr bool kMinima = has_minima(kNumbers);
  // How much larger the integers of `sum` are than the weights
  static constexpr int kZero = has_bytes(kWeights) ? kByteOffset : BlockForm{kWeights, kNumbers}.zero();
  Floats scale, other;

  ColumnNumbers(const uint8_t* block, const uint8_t* group, size_t column) {
    const auto* halves = reinterpret_cast<const uint16_t*>(are_multiples(kNumbers) ? group : block);
    const auto* floats = reinterpret_cast<const float*>(block);
    if constexpr (kNumbers == BlockNumbers::kByte) {
      const auto* bytes = reinterpret_cast<const int8_t*>(block);
      scale = mul(load_bytes(bytes + column), load_halves(halves + column));
    } else if constexpr (kNumbers == BlockNumbers::kByteMinimum) {
      scale = mul(load_bytes(block + column), load_halves(halves + column));
      other = mul(load_bytes(block + kPanel4 + column), load_halves(halves + kPanel4 + column));
    } else if constexpr (kNumbers == BlockNumbers::kHalfMinimum) {
      scale = load_halves(halves + column);
      other = load_halves(halves + kPanel4 + column);
    } else if constexpr (kNumbers == BlockNumbers::kHalfZero || kNumbers == BlockNumbers::kHalf) {
      scale = load_halves(halves + column);
      if constexpr (kZeros) other = load_bytes(block + kPanel4 * sizeof(uint16_t) + column);
    } else {
      scale = load(floats + column);
      if constexpr (kZeros) other = load_bytes(block + kPanel4 * sizeof(float) + column);
      if constexpr (kMinima) other = load(floats + kPanel4 + column);
    }
  }

  // Adds a block's part of a product, whose integers' sum is `sum`.
  Floats add(Sums sum, float step, float row_sum, Floats total) const {
    Floats integers = to_floats(sum);  // exact, as are the products with sums of rows
    if constexpr (kZeros) integers = fma(other, splat(row_sum), integers);
    if constexpr (kZero != 0) integers = fma(splat(float{kZero}), splat(row_sum), integers);
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
template <BlockWeights kWeights, BlockNumbers kNumbers, size_t kRows, size_t kVectors, bool kSingle>
void multiply_block_tile(const BlockRows& rows, size_t row, const BlockPanel& panel, size_t first,
                         const Result& to) {
  constexpr BlockForm kForm{kWeights, kNumbers};
  constexpr size_t kSize = kForm.chunk_size();
  const size_t row_stride = panel.num_chunks * kSize, num_blocks = panel.num_blocks();
  const uint8_t* weights = panel.weights + first * kQuad;
  const int8_t* values = rows.values + row * row_stride;
  const float* steps = rows.steps + row * num_blocks;
  const float* row_sums = rows.sums + row * num_blocks;
  Floats totals[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) totals[r][v] = splat(0.0f);
  }
  const uint8_t *group = nullptr, *pair = nullptr;
  for (size_t block = 0, chunk = 0; block < num_blocks; ++block) {
    if (are_multiples(kNumbers) && block % kForm.group_size() == 0) {
      group = weights - first * kQuad;
      prefetch_block(group, kForm.group_bytes());
      weights += kForm.group_bytes();
    }
    if (kForm.pair_bytes() > 0 && block % 2 == 0) {
      pair = weights - first * kQuad;
      prefetch_block(pair, kForm.pair_bytes());
      weights += kForm.pair_bytes();
    }
    Sums sums[kRows][kVectors];
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat_sum(0);
    }
    const size_t left = panel.num_chunks - chunk;
    const size_t end = chunk + (left < panel.chunks_per_block ? left : panel.chunks_per_block);
    do {
      if constexpr (has_bytes(kWeights)) {
        add_byte_chunk<kSize>(weights, values, row_stride, sums);
      } else {
        add_chunk<kWeights>(weights, values, row_stride, sums);
      }
      weights += chunk_bytes_of(kWeights);
      values += kSize;
    } while (++chunk < end && !kSingle);
    const uint8_t* numbers =
        kForm.pair_bytes() > 0 ? pair + block % 2 * kPanel4 : weights - first * kQuad;
    prefetch_block(numbers, kForm.number_bytes());
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      const ColumnNumbers<kWeights, kNumbers> column(numbers, group, first + v * kWidth);
      UNROLL for (size_t r = 0; r < kRows; ++r) {
        const size_t at = r * num_blocks + block;
        totals[r][v] = column.add(sums[r][v], steps[at], row_sums[at], totals[r][v]);
      }
    }
    weights += kForm.number_bytes();
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
  // Blocks of more than 4 bits are single chunks.
  auto multiply_tile = multiply_block_tile<kWeights, kNumbers, kRows, kVectors, true>;
  if constexpr (kWeights == BlockWeights::kNibbles) {
    if (panel.chunks_per_block > 1) {
      multiply_tile = multiply_block_tile<kWeights, kNumbers, kRows, kVectors, false>;
    }
  }
  for (size_t first = 0; first < to.num_columns; first += kVectors * kWidth) {
    multiply_tile(rows, row, panel, first, to);
  }
}

}  // namespace
