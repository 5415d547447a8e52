// The functions of gates. Private to isa/.
#pragma once
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_VECTORS {

CKDIST_INLINE Vec silu(Vec x) { return x / (set(1.0f) + exp(set(0.0f) - x)); }
// log(1 + exp(x)) = max(x, 0) + log(1 + t), t = exp(-|x|); log(1 + t) = 2 atanh(s), s = t / (2 + t) <= 1 / 3, by its
// series up to s^15, within 1e-8.
CKDIST_INLINE Vec softplus(Vec x) {
  const Vec t = exp(set(0.0f) - abs(x)), s = t / (set(2.0f) + t), square = s * s;
  Vec p = set(2.0f / 15);
  for (int n = 13; n > 0; n -= 2) p = fma(p, square, set(2.0f / static_cast<float>(n)));
  return fma(p, s, max(x, set(0.0f)));
}

CKDIST_INLINE Vec sigmoid(Vec x) { return set(1.0f) / (set(1.0f) + exp(set(0.0f) - x)); }

// Hendrycks & Gimpel 2016, arXiv:1606.08415: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
CKDIST_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = x * fma(x * x, set(0.044715f * 0.79788456f), set(0.79788456f));
  const Vec half = set(0.5f) * x;
  return fma(half, tanh(inner), half);
}

// 0.5 x (1 + erf(x / sqrt(2))), with erf |z| = 1 - t P(t) exp(-z^2), t = 1 / (1 + p |z|), within 1.5e-7. Abramowitz &
// Stegun 1964, 7.1.26.
CKDIST_INLINE Vec gelu(Vec x) {
  const Vec z = abs(x) * set(0.70710678f);
  const Vec t = set(1.0f) / fma(z, set(0.3275911f), set(1.0f));
  Vec p = set(1.061405429f);
  p = fma(p, t, set(-1.453152027f));
  p = fma(p, t, set(1.421413741f));
  p = fma(p, t, set(-0.284496736f));
  p = fma(p, t, set(0.254829592f));
  const Vec erf = copy_sign(fnma(p * t, exp(set(0.0f) - z * z), set(1.0f)), x);
  const Vec half = set(0.5f) * x;
  return fma(half, erf, half);
}

// g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up from -7 to 7. OpenAI 2025, gpt-oss model card,
// arXiv:2508.10925, section 2.
CKDIST_INLINE Vec clamped_swiglu(Vec gate, Vec up) {
  const Vec limit = set(7.0f), g = min(limit, gate), u = max(set(-7.0f), min(limit, up));
  return g * sigmoid(set(1.702f) * g) * (u + set(1.0f));
}

// silu(min(gate, 10)) * u, with u = up from -10 to 10 (DeepSeek-V4).
CKDIST_INLINE Vec clamped_silu(Vec gate, Vec up) {
  const Vec limit = set(10.0f);
  return silu(min(limit, gate)) * max(set(-10.0f), min(limit, up));
}

// min(silu(gate), limit) * u, with u = up from -limit to limit. Step-3.5.
CKDIST_INLINE Vec limited_silu(Vec gate, Vec up, Vec limit) {
  return min(limit, silu(gate)) * max(set(0.0f) - limit, min(limit, up));
}

// 4 tanh(gate / 4) sigmoid(gate) * 25 tanh(up / 25). Kimi Team 2026, arXiv:2607.24653 (SiTU).
CKDIST_INLINE Vec situ(Vec gate, Vec up) {
  const Vec g = set(4.0f) * tanh(gate * set(0.25f)) * sigmoid(gate);
  return g * (set(25.0f) * tanh(up * set(0.04f)));
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
