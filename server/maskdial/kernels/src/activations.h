// SiLU and GELU, by ONNX Runtime's approximations.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "vectors.h"

namespace {

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

inline Floats silu(Floats x) { return mul(x, sigmoid(x)); }

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

inline Floats gelu(Floats x) {
  const Floats scaled_x = mul(x, splat(0.707106781186547524f));
  const Floats erf = with_sign_of(erf_magnitude(magnitude(scaled_x)), scaled_x);
  return mul(mul(x, splat(0.5f)), add(erf, splat(1.0f)));
}

}  // namespace
