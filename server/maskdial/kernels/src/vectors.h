// Vectors of floats and of sums of one instruction set, which the compiler's flags choose.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include <cmath>
#include <cstring>

#include "halves.h"
#include "processor.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(SCALAR)
#include <arm_neon.h>
#define NEON
#endif

// Registers cannot be indexed: a loop over them has to be written out.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// kWidth floats or sums are a vector; each sum adds up the products of quads of bytes, or of pairs of
// 16-bit integers.
#if defined(__AVX512VNNI__)

constexpr size_t kWidth = 16;
using Floats = __m512;
using Sums = __m512i;

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats magnitude(Floats v) { return _mm512_abs_ps(v); }
inline Floats to_floats(Sums v) { return _mm512_cvtepi32_ps(v); }
inline Sums add_sums(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Sums load_sums(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_sums(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
inline Floats times_power_of_two(Floats v, Floats exponents) {
  return _mm512_scalef_ps(v, exponents);
}
// a where x > y, else b
inline Floats select_above(Floats x, Floats y, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
inline Floats with_sign_of(Floats v, Floats sign) {
  return _mm512_or_ps(v, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
// A bit for each lane, the first one the lowest: whether a >= b.
inline uint32_t lanes_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline bool all_below(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xffff;
}
inline float largest_lane(Floats v) { return _mm512_reduce_max_ps(v); }
inline float sum_of_lanes(Floats v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 lanes = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  lanes = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
  return _mm_cvtss_f32(_mm_add_ss(lanes, _mm_movehdup_ps(lanes)));
}
inline Floats round(Floats v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store_bytes(uint8_t* p, Floats v) {
  const __m512i integers = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(128));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(integers));
}

using Weights = __m512i;
using Inputs = __m512i;
inline Weights load_weights(const int8_t* p) { return _mm512_loadu_si512(p); }
inline Inputs splat_quad(int32_t quad) { return _mm512_set1_epi32(quad); }
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
  return _mm512_dpbusd_epi32(sums, inputs, weights);
}

inline void store_integers(int16_t* p, Floats v) {
  const __m256i integers = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), integers);
}
inline Sums zero_sums() { return _mm512_setzero_si512(); }
inline Floats load_halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
inline Floats load_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
using Pairs = __m512i;
inline Pairs splat_pair(const int16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof(both));
  return _mm512_set1_epi32(both);
}
inline Pairs load_pairs(const int8_t* p, const int8_t* q) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(first, second));
  return _mm512_cvtepi8_epi16(
      _mm256_inserti128_si256(low, _mm_unpackhi_epi8(first, second), 1));
}
inline Pairs load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Pairs load_pairs(const int16_t* p, const int16_t* q) {
  const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i first = _mm512_castsi256_si512(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_permutexvar_epi16(
      turns,
      _mm512_inserti64x4(first, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), 1));
}
inline Sums add_pair_products(Sums sums, Pairs a, Pairs b) {
  return _mm512_dpwssd_epi32(sums, a, b);
}

// Lanes row[columns[l] - begin], of columns that ascend by at most 1 each.
inline Floats load_columns(const float* row, size_t begin, const int32_t* columns) {
  const float* first = row + (static_cast<size_t>(columns[0]) - begin);
  if (columns[kWidth - 1] - columns[0] == static_cast<int32_t>(kWidth - 1)) return load(first);
  const __m512i places = _mm512_sub_epi32(load_sums(columns), _mm512_set1_epi32(columns[0]));
  return _mm512_permutexvar_ps(places, load(first));
}

#elif defined(__AVX2__)

constexpr size_t kWidth = 8;
using Floats = __m256;
using Sums = __m256i;

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats magnitude(Floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline Floats to_floats(Sums v) { return _mm256_cvtepi32_ps(v); }
inline Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Sums load_sums(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store_sums(int32_t* p, Sums v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
inline Floats times_power_of_two(Floats v, Floats exponents) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponents), _mm256_set1_epi32(127));
  return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
inline Floats select_above(Floats x, Floats y, Floats a, Floats b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ));
}
inline Floats with_sign_of(Floats v, Floats sign) {
  return _mm256_or_ps(v, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
inline uint32_t lanes_at_least(Floats a, Floats b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
inline bool all_below(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xff;
}
inline float largest_lane(Floats v) {
  __m128 lanes = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  lanes = _mm_max_ps(lanes, _mm_movehl_ps(lanes, lanes));
  return _mm_cvtss_f32(_mm_max_ss(lanes, _mm_movehdup_ps(lanes)));
}
inline float sum_of_lanes(Floats v) {
  __m128 lanes = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  lanes = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
  return _mm_cvtss_f32(_mm_add_ss(lanes, _mm_movehdup_ps(lanes)));
}
inline Floats round(Floats v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store_bytes(uint8_t* p, Floats v) {
  const __m256i integers = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(128));
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}

using Weights = __m256i;
inline Weights load_weights(const int8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
#if defined(__AVXVNNI__)
using Inputs = __m256i;
inline Inputs splat_quad(int32_t quad) { return _mm256_set1_epi32(quad); }
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
  return _mm256_dpbusd_avx_epi32(sums, inputs, weights);
}
#else
// vpmaddubsw adds two products in 16 bits, which saturate for bytes above 128. So it multiplies the
// magnitudes of the signed inputs, at most 128, by weights with the inputs' signs. For negative inputs
// the weights' bits are inverted: vpsignb would compete with the products for the processor's
// multipliers. An inverted weight is its negative minus 1, so that each product lacks the input's
// magnitude. Together, they lack the same in all columns.
#define SIGNED_INPUTS
#define INVERTED_WEIGHTS
inline Sums missing_of(const uint8_t* row, size_t size) {
  const __m256i zero_points = _mm256_set1_epi8(-128);
  __m256i sums = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 32 <= size; i += 32) {
    const __m256i inputs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i));
    const __m256i negative = _mm256_subs_epu8(zero_points, inputs);
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(negative, _mm256_setzero_si256()));
  }
  const __m128i halves =
      _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  int32_t sum = _mm_extract_epi32(halves, 0) + _mm_extract_epi32(halves, 2);
  for (; i < size; ++i) sum += row[i] < 128 ? 128 - row[i] : 0;
  return _mm256_set1_epi32(sum);
}
struct Inputs {
  __m256i inversions, magnitudes;
};
inline Inputs splat_quad(int32_t quad) {
  const __m256i values = _mm256_xor_si256(_mm256_set1_epi32(quad), _mm256_set1_epi8(-128));
  return {_mm256_cmpgt_epi8(_mm256_setzero_si256(), values), _mm256_abs_epi8(values)};
}
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
  const __m256i pairs =
      _mm256_maddubs_epi16(inputs.magnitudes, _mm256_xor_si256(weights, inputs.inversions));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

inline void store_integers(int16_t* p, Floats v) {
  const __m256i integers = _mm256_cvtps_epi32(v);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(integers),
                                         _mm256_extracti128_si256(integers, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline Sums zero_sums() { return _mm256_setzero_si256(); }
inline Floats load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}
inline Floats load_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
using Pairs = __m256i;
inline Pairs splat_pair(const int16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof(both));
  return _mm256_set1_epi32(both);
}
inline Pairs load_pairs(const int8_t* p, const int8_t* q) {
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q));
  return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
}
inline Pairs load_pairs(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Pairs load_pairs(const int16_t* p, const int16_t* q) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  return _mm256_set_m128i(_mm_unpackhi_epi16(first, second), _mm_unpacklo_epi16(first, second));
}
inline Sums add_pair_products(Sums sums, Pairs a, Pairs b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

inline Floats load_columns(const float* row, size_t begin, const int32_t* columns) {
  const float* first = row + (static_cast<size_t>(columns[0]) - begin);
  if (columns[kWidth - 1] - columns[0] == static_cast<int32_t>(kWidth - 1)) return load(first);
  const __m256i places = _mm256_sub_epi32(load_sums(columns), _mm256_set1_epi32(columns[0]));
  return _mm256_permutevar8x32_ps(load(first), places);
}

#elif defined(NEON)

constexpr size_t kWidth = 4;
using Floats = float32x4_t;
using Sums = int32x4_t;

inline Floats load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Floats v) { vst1q_f32(p, v); }
inline Floats splat(float v) { return vdupq_n_f32(v); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats div(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
// The second one if one is not a number, as on x86: vminq and vmaxq would return that.
inline Floats min(Floats a, Floats b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Floats max(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats magnitude(Floats v) { return vabsq_f32(v); }
inline Floats to_floats(Sums v) { return vcvtq_f32_s32(v); }
inline Sums add_sums(Sums a, Sums b) { return vaddq_s32(a, b); }
inline Sums load_sums(const int32_t* p) { return vld1q_s32(p); }
inline void store_sums(int32_t* p, Sums v) { vst1q_s32(p, v); }
inline Floats times_power_of_two(Floats v, Floats exponents) {
  const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(exponents), vdupq_n_s32(127));
  return vmulq_f32(v, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}
inline Floats select_above(Floats x, Floats y, Floats a, Floats b) {
  return vbslq_f32(vcgtq_f32(x, y), a, b);
}
inline Floats with_sign_of(Floats v, Floats sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000), sign, v);
}
inline uint32_t lanes_at_least(Floats a, Floats b) {
  const uint32_t bits[kWidth] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgeq_f32(a, b), vld1q_u32(bits)));
}
inline bool all_below(Floats a, Floats b) { return vminvq_u32(vcltq_f32(a, b)) != 0; }
inline float largest_lane(Floats v) { return vmaxvq_f32(v); }
inline float sum_of_lanes(Floats v) {
  return vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
}
inline Floats round(Floats v) { return vrndnq_f32(v); }
// The lowest byte of each integer.
inline void store_low_bytes(void* p, int32x4_t integers) {
  const int16x4_t halves = vmovn_s32(integers);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  std::memcpy(p, &four, sizeof(four));
}
inline void store_bytes(uint8_t* p, Floats v) {
  store_low_bytes(p, vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(128)));
}

// `sdot` multiplies signed bytes only, so the inputs are shifted by their zero point.
#define SIGNED_INPUTS
inline Sums zero_sums() { return vdupq_n_s32(0); }
inline Floats load_halves(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline Floats load_bytes(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}
inline Floats load_bytes(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(four));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
using Weights = int8x16_t;
using Inputs = int8x16_t;
inline Weights load_weights(const int8_t* p) { return vld1q_s8(p); }
inline Inputs splat_quad(int32_t quad) {
  return veorq_s8(vreinterpretq_s8_s32(vdupq_n_s32(quad)), vdupq_n_s8(-128));
}
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, inputs, weights);
#else
  // Two products fit 16 bits: inputs are at most 128, weights 127.
  const int16x8_t low = vmull_s8(vget_low_s8(inputs), vget_low_s8(weights));
  return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(inputs, weights)));
#endif
}

inline void store_integers(int16_t* p, Floats v) { vst1_s16(p, vmovn_s32(vcvtnq_s32_f32(v))); }
struct Pairs {
  int16x4_t first, second;
};
inline Pairs splat_pair(const int16_t* pair) { return {vdup_n_s16(pair[0]), vdup_n_s16(pair[1])}; }
inline int16x4_t load_widened(const int8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes))));
}
inline Pairs load_pairs(const int8_t* p, const int8_t* q) {
  return {load_widened(p), load_widened(q)};
}
inline Pairs load_pairs(const int16_t* p) {
  const int16x4x2_t pairs = vld2_s16(p);
  return {pairs.val[0], pairs.val[1]};
}
inline Pairs load_pairs(const int16_t* p, const int16_t* q) { return {vld1_s16(p), vld1_s16(q)}; }
inline Sums add_pair_products(Sums sums, const Pairs& a, const Pairs& b) {
  return vmlal_s16(vmlal_s16(sums, a.first, b.first), a.second, b.second);
}

inline Floats load_columns(const float* row, size_t begin, const int32_t* columns) {
  float lanes[kWidth];
  for (size_t l = 0; l < kWidth; ++l) lanes[l] = row[static_cast<size_t>(columns[l]) - begin];
  return load(lanes);
}

#else

constexpr size_t kWidth = 1;
using Floats = float;
using Sums = int32_t;

inline Floats load(const float* p) { return *p; }
inline void store(float* p, Floats v) { *p = v; }
inline Floats splat(float v) { return v; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats div(Floats a, Floats b) { return a / b; }
inline Floats fma(Floats a, Floats b, Floats c) { return std::fmaf(a, b, c); }
// As the instructions do, the second one if one is not a number.
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats magnitude(Floats v) { return std::fabs(v); }
inline Floats to_floats(Sums v) { return static_cast<float>(v); }
inline Sums add_sums(Sums a, Sums b) { return a + b; }
inline Sums load_sums(const int32_t* p) { return *p; }
inline void store_sums(int32_t* p, Sums v) { *p = v; }
inline Floats times_power_of_two(Floats v, Floats exponents) {
  return std::ldexp(v, static_cast<int>(exponents));
}
inline Floats select_above(Floats x, Floats y, Floats a, Floats b) { return x > y ? a : b; }
inline Floats with_sign_of(Floats v, Floats sign) { return std::copysign(v, sign); }
inline uint32_t lanes_at_least(Floats a, Floats b) { return a >= b; }
inline bool all_below(Floats a, Floats b) { return a < b; }
inline float largest_lane(Floats v) { return v; }
inline float sum_of_lanes(Floats v) { return v; }
inline Floats round(Floats v) { return std::nearbyintf(v); }
inline void store_bytes(uint8_t* p, Floats v) {
  *p = static_cast<uint8_t>(static_cast<int>(std::nearbyintf(v)) + 128);
}

using Weights = const int8_t*;
using Inputs = uint32_t;
inline Weights load_weights(const int8_t* p) { return p; }
inline Inputs splat_quad(int32_t quad) { return static_cast<uint32_t>(quad); }
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
  for (size_t i = 0; i < kQuad; ++i) {
    sums += static_cast<int32_t>((inputs >> (8 * i)) & 0xff) * weights[i];
  }
  return sums;
}

inline void store_integers(int16_t* p, Floats v) {
  *p = static_cast<int16_t>(std::nearbyintf(v));
}
inline Sums zero_sums() { return 0; }
inline Floats load_halves(const uint16_t* p) { return half_to_float(*p); }
inline Floats load_bytes(const uint8_t* p) { return *p; }
inline Floats load_bytes(const int8_t* p) { return *p; }
struct Pairs {
  int32_t first, second;
};
inline Pairs splat_pair(const int16_t* pair) { return {pair[0], pair[1]}; }
inline Pairs load_pairs(const int8_t* p, const int8_t* q) { return {*p, *q}; }
inline Pairs load_pairs(const int16_t* p) { return {p[0], p[1]}; }
inline Pairs load_pairs(const int16_t* p, const int16_t* q) { return {*p, *q}; }
inline Sums add_pair_products(Sums sums, const Pairs& a, const Pairs& b) {
  return sums + a.first * b.first + a.second * b.second;
}

inline Floats load_columns(const float* row, size_t begin, const int32_t* columns) {
  return row[static_cast<size_t>(*columns) - begin];
}

#endif

// Prefetches some lines of a thread's next reads into the level-2 cache.
inline void fetch(Prefetch& next, size_t num_lines) {
  for (; num_lines > 0 && next.size > 0; --num_lines) {
    __builtin_prefetch(next.bytes, 0, 2);
    next.bytes += kLine;
    next.size -= next.size < kLine ? next.size : kLine;
  }
}

// The sum of kLanes lanes in several vectors: those that are eight apart first, then four, two and one,
// on every processor.
inline float sum_of_lanes(Floats (&vectors)[kLanes / kWidth]) {
  UNROLL for (size_t apart = kLanes / kWidth / 2; apart > 0; apart /= 2) {
    UNROLL for (size_t v = 0; v < apart; ++v) vectors[v] = add(vectors[v], vectors[v + apart]);
  }
  return sum_of_lanes(vectors[0]);
}

// Runs body(i, count) for whole vectors, and once for the rest.
template <typename Body>
inline void for_each_vector(size_t size, Body body) {
  size_t i = 0;
  for (; i + kWidth <= size; i += kWidth) body(i, kWidth);
  if (i < size) body(i, size - i);
}

inline Floats load_some(const float* p, size_t count) {
  if (count == kWidth) return load(p);
  float copy[kWidth] = {};
  std::memcpy(copy, p, count * sizeof(float));
  return load(copy);
}

inline void store_some(float* p, Floats v, size_t count) {
  if (count == kWidth) return store(p, v);
  float copy[kWidth];
  store(copy, v);
  std::memcpy(p, copy, count * sizeof(float));
}

inline void store_some_bytes(uint8_t* p, Floats v, size_t count) {
  if (count == kWidth) return store_bytes(p, v);
  uint8_t copy[kWidth];
  store_bytes(copy, v);
  std::memcpy(p, copy, count);
}

}  // namespace
