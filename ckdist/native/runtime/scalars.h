// Small functions that several steps use.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/row.h"

namespace ckdist {

inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
inline float softplus(float x) { return std::max(x, 0.f) + std::log1p(std::exp(-std::abs(x))); }

inline Row float_row(const float* at) { return {reinterpret_cast<uint8_t*>(const_cast<float*>(at)), false}; }

// The factor on the queries of a token by its position.
inline float query_factor(float beta, int64_t context, int64_t position) {
  return beta == 0.f ? 1.f : 1.f + beta * std::log(1.f + float(position / context));
}

}  // namespace ckdist
