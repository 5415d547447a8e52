// The functions of gates. Private to isa/.
#pragma once
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_VECTORS {

CKDIST_INLINE Vec silu(Vec x) { return x / (set(1.0f) + exp(set(0.0f) - x)); }
CKDIST_INLINE Vec sigmoid(Vec x) { return set(1.0f) / (set(1.0f) + exp(set(0.0f) - x)); }

// Hendrycks & Gimpel 2016, arXiv:1606.08415: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
CKDIST_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = x * fma(x * x, set(0.044715f * 0.79788456f), set(0.79788456f));
  const Vec half = set(0.5f) * x;
  return fma(half, tanh(inner), half);
}

// g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up from -7 to 7. OpenAI 2025, gpt-oss model card,
// arXiv:2508.10925, section 2.
CKDIST_INLINE Vec clamped_swiglu(Vec gate, Vec up) {
  const Vec limit = set(7.0f), g = min(limit, gate), u = max(set(-7.0f), min(limit, up));
  return g * sigmoid(set(1.702f) * g) * (u + set(1.0f));
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
