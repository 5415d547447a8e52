// The factor on the queries of a token by its position.
#pragma once
#include <cmath>
#include <cstdint>

namespace ckdist {

inline float query_factor(float beta, int64_t context, int64_t position) {
  return beta == 0.f ? 1.f : 1.f + beta * std::log(1.f + float(position / context));
}

}  // namespace ckdist
