// The kernels of one instruction set, which the compiler's flags choose: AVX-512 VNNI, AVX-VNNI,
// AVX2, or none. All compute the same bits: integer sums are exact, and every operation on floats
// is the same one, in the same order.
#include "processor.h"

#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Names differ between the files that are compiled from this one.
// Registers cannot be indexed: a loop over them has to be written out.
#define UNROLL _Pragma("GCC unroll 16")

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

// Nothing here has external linkage but the table: an inline function compiled with AVX-512 must
// not be the one that the linker keeps for every processor.
namespace {

// Weights are read once per pass, in panels of a few kilobytes, each too short for the processor to
// foresee the next one. The last panel is followed by memory that is not the matrix's: a prefetch
// of it does nothing.
constexpr size_t kPrefetched = 4096, kLine = 64;

constexpr float kZeroPoint = 128.0f;

// The vectors of floats and of sums; kWidth floats each, and a quad of bytes for each sum.
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
// vpmaddubsw adds two products in 16 bits, which saturate for bytes above 128. So it multiplies
// the magnitudes of the signed inputs, at most 128, by weights with the inputs' signs.
#define SIGNED_INPUTS
struct Inputs {
  __m256i values, magnitudes;
};
inline Inputs splat_quad(int32_t quad) {
  const __m256i values = _mm256_xor_si256(_mm256_set1_epi32(quad), _mm256_set1_epi8(-128));
  return {values, _mm256_abs_epi8(values)};
}
inline Sums add_products(Sums sums, Inputs inputs, Weights weights) {
  const __m256i pairs =
      _mm256_maddubs_epi16(inputs.magnitudes, _mm256_sign_epi8(weights, inputs.values));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

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
inline Sums load_sums(const int32_t* p) { return *p; }
inline void store_sums(int32_t* p, Sums v) { *p = v; }
inline Floats times_power_of_two(Floats v, Floats exponents) {
  return std::ldexp(v, static_cast<int>(exponents));
}
inline Floats select_above(Floats x, Floats y, Floats a, Floats b) { return x > y ? a : b; }
inline Floats with_sign_of(Floats v, Floats sign) { return std::copysign(v, sign); }
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

#endif

// Runs body(i) for whole vectors from p on, and on copies of what is left.
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

// The integers that QuantizeLinear rounds to, less the zero point; what is not a number is least.
inline Floats scaled(Floats values, Floats step) {
  const Floats integers = max(div(values, step), splat(-kZeroPoint));
  return min(integers, splat(255.0f - kZeroPoint));
}

void quantize(const float* row, size_t size, float step, uint8_t* out) {
  const Floats steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some_bytes(out + i, scaled(load_some(row + i, count), steps), count);
  });
}

float quantize_by_peak(const float* row, size_t size, float step, uint8_t* out) {
  Floats largest = splat(0.0f);
  for_each_vector(size, [&](size_t i, size_t count) {
    largest = max(magnitude(load_some(row + i, count)), largest);
  });
  float lanes[kWidth];
  store(lanes, largest);
  float peak = 0.0f;
  for (float lane : lanes) peak = lane > peak ? lane : peak;
  const Floats peaks = splat(peak), steps = splat(step);
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats unit = div(load_some(row + i, count), peaks);
    store_some_bytes(out + i, scaled(unit, steps), count);
  });
  return peak;
}

// A tile of kRows rows and kVectors vectors of columns. Its sums stay in registers.
template <size_t kRows, size_t kVectors>
inline void multiply_tile(const uint8_t* rows, const Panel& panel, size_t first,
                          const float* peaks, float* out, size_t out_stride, size_t num_columns) {
  const size_t row_stride = panel.num_quads * kQuad;
  const int8_t* weights = panel.weights + first * kQuad;
  Sums sums[kRows][kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) {
#ifdef SIGNED_INPUTS
    const Sums start = _mm256_setzero_si256();
#else
    const Sums start = load_sums(panel.corrections + first + v * kWidth);
#endif
    UNROLL for (size_t r = 0; r < kRows; ++r) sums[r][v] = start;
  }
  for (size_t q = 0; q < panel.num_quads; ++q, weights += kPanel * kQuad) {
    for (size_t byte = 0; byte < kVectors * kWidth * kQuad; byte += kLine) {
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
  // Loops over registers end here: what follows takes the sums from memory.
  int32_t results[kRows][kVectors * kWidth];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) store_sums(results[r] + v * kWidth, sums[r][v]);
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const size_t column = first + v * kWidth;
    if (column >= num_columns) break;
    const size_t count = num_columns - column < kWidth ? num_columns - column : kWidth;
    const Floats factors = load(panel.factors + column);
    for (size_t r = 0; r < kRows; ++r) {
      Floats result = mul(to_floats(load_sums(results[r] + v * kWidth)), factors);
      if (peaks != nullptr) result = mul(result, splat(peaks[r]));
      if (panel.biases != nullptr) result = add(result, load(panel.biases + column));
      store_some(out + r * out_stride + column, result, count);
    }
  }
}

// Vectors per tile: with more rows, fewer registers are left.
#if defined(__AVX512VNNI__)
constexpr size_t kTileRows = 12, kTileVectors = 2;
#elif defined(__AVXVNNI__)
constexpr size_t kTileRows = 6, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr size_t kTileRows = 4, kTileVectors = 2;
#else
constexpr size_t kTileRows = 1, kTileVectors = 4;
#endif

template <size_t kRows>
void multiply_rows(size_t num_rows, const uint8_t* rows, const Panel& panel, const float* peaks,
                   float* out, size_t out_stride, size_t num_columns) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_rows<kRows - 1>(num_rows, rows, panel, peaks, out, out_stride, num_columns);
    }
  }
  for (size_t first = 0; first < num_columns; first += kTileVectors * kWidth) {
    multiply_tile<kRows, kTileVectors>(rows, panel, first, peaks, out, out_stride, num_columns);
  }
}

void multiply(const uint8_t* rows, size_t num_rows, const Panel& panel, const float* peaks,
              float* out, size_t out_stride, size_t num_columns) {
  while (num_rows > 0) {
    const size_t some = num_rows < kTileRows ? num_rows : kTileRows;
    multiply_rows<kTileRows>(some, rows, panel, peaks, out, out_stride, num_columns);
    rows += some * panel.num_quads * kQuad;
    if (peaks != nullptr) peaks += some;
    out += some * out_stride;
    num_rows -= some;
  }
}

// The rational approximation of ONNX Runtime's Sigmoid (mlas, logistic.cpp).
inline Floats sigmoid(Floats x) {
  x = min(max(x, splat(-18.0f)), splat(18.0f));
  const Floats square = mul(x, x);
  Floats p = fma(square, splat(4.37031012579801e-11f), splat(1.15627324459942e-07f));
  p = fma(p, square, splat(6.08574864600143e-05f));
  p = fma(p, square, splat(8.51377133304701e-03f));
  p = fma(p, square, splat(2.48287947061529e-01f));
  p = mul(p, x);
  Floats q = fma(square, splat(6.10247389755681e-13f), splat(5.76102136993427e-09f));
  q = fma(q, square, splat(6.29106785017040e-06f));
  q = fma(q, square, splat(1.70198817374094e-03f));
  q = fma(q, square, splat(1.16817656904453e-01f));
  q = fma(q, square, splat(9.93151921023180e-01f));
  return add(div(p, q), splat(0.5f));
}

void gate(const float* gates, float* up, size_t size) {
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats x = load_some(gates + i, count);
    const Floats silu = mul(x, sigmoid(x));
    store_some(up + i, mul(silu, load_some(up + i, count)), count);
  });
}

// The piecewise approximation of ONNX Runtime's Erf (mlas, erf.cpp) for magnitudes.
inline Floats erf_magnitude(Floats x) {
  const Floats boundary = splat(0.921875f);
  x = min(x, splat(3.925f));
  const Floats square = mul(x, x);
  Floats small = fma(splat(-5.99104969e-4f), square, splat(4.99339588e-3f));
  small = fma(small, square, splat(-2.67667342e-2f));
  small = fma(small, square, splat(1.12818025e-1f));
  small = fma(small, square, splat(-3.76124859e-1f));
  small = fma(small, square, splat(1.28379151e-1f));
  small = fma(small, x, x);
  Floats large = fma(splat(1.72948930e-5f), x, splat(-3.83208680e-4f));
  large = fma(large, x, splat(3.88393435e-3f));
  large = fma(large, x, splat(-2.42545605e-2f));
  large = fma(large, x, splat(1.06777847e-1f));
  large = fma(large, x, splat(6.34846687e-1f));
  large = fma(large, x, splat(1.28717512e-1f));
  large = sub(splat(0.0f), fma(large, x, x));
  // 1 - e to the power of large, whose magnitude is small
  const Floats shift = splat(1.25829120e+7f);
  const Floats n = sub(fma(splat(1.44269504088896341f), large, shift), shift);
  Floats r = fma(n, splat(-6.93145752e-1f), large);
  r = fma(n, splat(-1.42860677e-6f), r);
  Floats p = fma(splat(1.38319808e-3f), r, splat(8.37550033e-3f));
  p = fma(p, r, splat(4.16689515e-2f));
  p = fma(p, r, splat(1.66664466e-1f));
  p = fma(p, r, splat(4.99999851e-1f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return select_above(x, boundary, sub(splat(1.0f), times_power_of_two(p, n)), small);
}

void gelu(float* values, size_t size) {
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats x = load_some(values + i, count);
    const Floats scaled_x = mul(x, splat(0.707106781186547524f));
    const Floats erf = with_sign_of(erf_magnitude(magnitude(scaled_x)), scaled_x);
    store_some(values + i, mul(mul(x, splat(0.5f)), add(erf, splat(1.0f))), count);
  });
}

void rotate(const float* head, size_t head_size, const float* cosines, const float* sines,
            size_t half, float* out) {
  for_each_vector(half, [&](size_t i, size_t count) {
    const Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
    const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
    store_some(out + i, sub(mul(a, c), mul(b, s)), count);
    store_some(out + half + i, add(mul(b, c), mul(a, s)), count);
  });
  std::memcpy(out + 2 * half, head + 2 * half, (head_size - 2 * half) * sizeof(float));
}

// e to the power of x <= 0; below -87, where floats end, as for -87. The polynomial is that of
// Cephes' expf, exact to a bit or two.
inline Floats exponential(Floats x) {
  x = max(x, splat(-87.0f));
  const Floats n = round(mul(x, splat(1.44269504088896341f)));
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return times_power_of_two(p, n);
}

// out[d][i] = rows[i][d] for kKeyBlock rows, of which count are there.
void transpose(const float* rows, size_t count, size_t size, float* out) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + 4 <= count; i += 4) {
    const float* p = rows + i * size;
    for (size_t d = 0; d < size; d += 4) {
      __m128 a = _mm_loadu_ps(p + d), b = _mm_loadu_ps(p + size + d);
      __m128 c = _mm_loadu_ps(p + 2 * size + d), e = _mm_loadu_ps(p + 3 * size + d);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      _mm_storeu_ps(out + d * kKeyBlock + i, a);
      _mm_storeu_ps(out + (d + 1) * kKeyBlock + i, b);
      _mm_storeu_ps(out + (d + 2) * kKeyBlock + i, c);
      _mm_storeu_ps(out + (d + 3) * kKeyBlock + i, e);
    }
  }
#endif
  for (; i < count; ++i) {
    for (size_t d = 0; d < size; ++d) out[d * kKeyBlock + i] = rows[i * size + d];
  }
  for (size_t d = 0; d < size && count < kKeyBlock; ++d) {
    std::memset(out + d * kKeyBlock + count, 0, (kKeyBlock - count) * sizeof(float));
  }
}

#if defined(__AVX512VNNI__)
constexpr size_t kFloatRows = 6, kFloatVectors = 4;
#elif defined(__AVX2__)
constexpr size_t kFloatRows = 3, kFloatVectors = 4;
#else
constexpr size_t kFloatRows = 1, kFloatVectors = 16;
#endif

// kRows rows of a matrix times kVectors vectors of columns, in the order of the inner index:
// out[r][c] = factors[r] * sum over i < size of left[r][i] * right[i][c]
template <size_t kRows, size_t kVectors>
inline void multiply_floats_tile(const float* left, size_t left_stride, const float* right,
                                 size_t right_stride, size_t size, const float* factors,
                                 float* const* out, size_t column) {
  Floats sums[kRows][kVectors];
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  for (size_t i = 0; i < size; ++i) {
    Floats columns[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      columns[v] = load(right + i * right_stride + column + v * kWidth);
    }
    UNROLL for (size_t r = 0; r < kRows; ++r) {
      const Floats factor = splat(left[r * left_stride + i]);
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = fma(factor, columns[v], sums[r][v]);
      }
    }
  }
  UNROLL for (size_t r = 0; r < kRows; ++r) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      store(out[r] + column + v * kWidth, mul(sums[r][v], splat(factors[r])));
    }
  }
}

template <size_t kRows>
void multiply_floats(size_t num_rows, const float* left, size_t left_stride, const float* right,
                     size_t right_stride, size_t size, const float* factors, float* const* out,
                     size_t num_columns) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return multiply_floats<kRows - 1>(num_rows, left, left_stride, right, right_stride, size,
                                        factors, out, num_columns);
    }
  }
  size_t column = 0;
  for (; column + kFloatVectors * kWidth <= num_columns; column += kFloatVectors * kWidth) {
    multiply_floats_tile<kRows, kFloatVectors>(left, left_stride, right, right_stride, size,
                                               factors, out, column);
  }
  for (; column < num_columns; column += kWidth) {
    multiply_floats_tile<kRows, 1>(left, left_stride, right, right_stride, size, factors, out,
                                   column);
  }
}

// Turns scores into e to the power of score - largest, followed by zeros; returns 1 / their sum.
float soften(float* scores, size_t length, size_t stride) {
  Floats largest = splat(scores[0]);
  for_each_vector(length, [&](size_t i, size_t count) {
    if (count == kWidth) largest = max(load(scores + i), largest);
    for (size_t j = i; count < kWidth && j < length; ++j) {
      largest = max(splat(scores[j]), largest);
    }
  });
  float lanes[kLanes];
  store(lanes, largest);
  float peak = lanes[0];
  for (size_t i = 1; i < kWidth; ++i) peak = lanes[i] > peak ? lanes[i] : peak;
  const Floats peaks = splat(-peak);
  for (size_t i = 0; i < length; i += kWidth) {
    store(scores + i, exponential(add(load(scores + i), peaks)));
  }
  std::memset(scores + length, 0, (stride - length) * sizeof(float));
  Floats sums[kLanes / kWidth];
  UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) sums[v] = splat(0.0f);
  for (size_t i = 0; i < length; i += kLanes) {
    UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) {
      sums[v] = add(sums[v], load(scores + i + v * kWidth));
    }
  }
  UNROLL for (size_t v = 0; v < kLanes / kWidth; ++v) store(lanes + v * kWidth, sums[v]);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return 1.0f / sum;
}

void attend(const Queries& queries, float* scratch) {
  const size_t stride = queries.score_stride(), size = queries.head_size;
  float* transposed = scratch + queries.num_rows * stride;
  float factors[kFloatRows];
  float* out[kFloatRows];
  for (size_t start = 0; start < queries.longest(); start += kKeyBlock) {
    const size_t left = queries.longest() - start;
    transpose(queries.keys + start * size, left < kKeyBlock ? left : kKeyBlock, size, transposed);
    for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
      const size_t some =
          queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
      if (queries.length(row + some - 1) <= start) continue;
      for (size_t r = 0; r < some; ++r) {
        factors[r] = queries.scale;
        out[r] = scratch + (row + r) * stride + start;
      }
      multiply_floats<kFloatRows>(some, queries.rows + row * size, size, transposed, kKeyBlock,
                                  size, factors, out, kKeyBlock);
    }
  }
  for (size_t row = 0; row < queries.num_rows; row += kFloatRows) {
    const size_t some = queries.num_rows - row < kFloatRows ? queries.num_rows - row : kFloatRows;
    for (size_t r = 0; r < some; ++r) {
      const size_t token = (row + r) / queries.group, head = (row + r) % queries.group;
      factors[r] = soften(scratch + (row + r) * stride, queries.length(row + r), stride);
      out[r] = queries.out + token * queries.out_stride + head * size;
    }
    multiply_floats<kFloatRows>(some, scratch + row * stride, stride, queries.values, size,
                                queries.length(row + some - 1), factors, out, size);
  }
}

}  // namespace

extern const Processor JOIN(processor_, ISA);
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)
const Processor JOIN(processor_, ISA) = {TEXT(ISA), quantize, quantize_by_peak, multiply, gate,
                                          gelu,      rotate,           attend};
