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

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
