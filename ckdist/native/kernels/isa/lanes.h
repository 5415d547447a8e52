// Rows of any length, Vec by Vec. Private to isa/.
#pragma once
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_VECTORS {

CKDIST_INLINE int lanes_left(int64_t n, int64_t i) { return static_cast<int>(n - i < kLanes ? n - i : kLanes); }
CKDIST_INLINE Vec load_lanes(const float* p, int lanes) { return lanes == kLanes ? load(p) : load_n(p, lanes); }
CKDIST_INLINE void store_lanes(float* p, Vec a, int lanes) { lanes == kLanes ? store(p, a) : store_n(p, a, lanes); }

// Calls body(i, lanes) for every Vec of a row. `lanes` is 16, except for the last.
template <class Body>
CKDIST_INLINE void each(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; n - i >= kLanes; i += kLanes) body(i, kLanes);
  if (i < n) body(i, lanes_left(n, i));
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
