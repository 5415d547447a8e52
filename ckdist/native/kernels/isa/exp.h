// exp and tanh over sixteen lanes, within 2 ulp; NaN stays NaN. Private to isa/.
//
// exp(x) = 2^n exp(r), r = x - n ln 2, |r| <= ln(2) / 2, ln 2 in two parts (Cody & Waite 1980); exp(r) - 1 - r = r^2
// P(r) with P of degree 4, fitted to minimize the largest relative error of exp: 0.05 ulp before rounding.
#pragma once
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_VECTORS {

struct Reduced {
  Vec power;  // n in the low mantissa bits
  Vec expm1;  // exp(r) - 1
};

CKDIST_INLINE Reduced reduce_exp(Vec x) {
  const Vec shifter = set(0x1.8p23f);  // adding it rounds to an integer, which is then in the low bits
  const Vec power = fma(x, set(0x1.715476p0f), shifter);
  const Vec n = power - shifter;
  Vec r = fnma(n, set(0x1.62e4p-1f), x);
  r = fnma(n, set(0x1.7f7d1cp-20f), r);
  Vec p = set(0x1.6a2256p-10f);
  p = fma(p, r, set(0x1.123b04p-7f));
  p = fma(p, r, set(0x1.5558f8p-5f));
  p = fma(p, r, set(0x1.55549p-3f));
  p = fma(p, r, set(0x1.fffffcp-2f));
  return {power, fma(r * r, p, r)};
}

// 0 if the result is less than the smallest normal number, infinity if it is too large. exp(0) is exactly 1.
CKDIST_INLINE Vec exp(Vec x) {
  const Reduced reduced = reduce_exp(x);
  Vec y = add_exponent(reduced.expm1 + set(1.0f), reduced.power);
  y = select(less(x, set(-0x1.5d589ep6f)), set(0.0f), y);
  return select(less(set(0x1.62e42ep6f), x), set(__builtin_inff()), y);
}

// round(2^16 exp(x)) for x <= 0, as a whole number; 0 from x = -20 on. Within 0.7 of exact, exact at 0; NaN stays NaN.
CKDIST_INLINE Vec exp_units(Vec x) {
  const Vec y = max(set(-20.0f), x);
  const Vec power = fma(y, set(0x1.715476p0f), set(0x1.8p23f + 16.0f));
  const Vec r = fnma(power - set(0x1.8p23f + 16.0f), set(0x1.62e43p-1f), y);
  Vec p = fma(set(0x1.5414c8p-5f), r, set(0x1.57ced6p-3f));
  p = fma(p, r, set(0x1.0003f4p-1f));
  p = fma(p, r, set(0x1.fffba6p-1f));
  return (add_exponent(fma(p, r, set(1.0f)), power) + set(0x1p23f)) - set(0x1p23f);
}

// 2^x for x <= 0, within 2^-18, which is enough for results rounded to bfloat16. At least 2^-126; NaN stays NaN.
CKDIST_INLINE Vec exp2_coarse(Vec x) {
  const Vec y = max(set(-126.0f), x), power = y + set(0x1.8p23f), r = y - (power - set(0x1.8p23f));
  Vec p = fma(set(0x1.3997d6p-7f), r, set(0x1.ca1442p-5f));
  p = fma(p, r, set(0x1.ec06dap-3f));
  p = fma(p, r, set(0x1.62e0dcp-1f));
  return add_exponent(fma(p, r, set(0x1.ffffe8p-1f)), power);
}

// tanh |x| = e / (e + 2), e = exp(2 |x|) - 1, without cancellation. In float it is 1 from |x| = 9.02 on.
CKDIST_INLINE Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Reduced reduced = reduce_exp(min(set(30.0f), magnitude + magnitude));
  const Vec power = add_exponent(set(1.0f), reduced.power);
  const Vec e = fma(power, reduced.expm1, power - set(1.0f));
  return copy_sign(e / (e + set(2.0f)), x);
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
