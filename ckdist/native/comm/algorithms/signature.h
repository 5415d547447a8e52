// Identifies a collective call. Ranks compare it when they synchronize, so that different calls are an error and not a
// wrong result.
#pragma once
#include <cstdint>

#include "kernels/reduce.h"

namespace ckdist {

enum class Call : int { reduce, reduce_scatter, gather, all_to_all, broadcast, barrier };

inline uint64_t signature(Call call, int64_t a, int64_t b = 0) {
  uint64_t h = 0x9e3779b97f4a7c15u * uint64_t(int(call) + 1);
  for (const int64_t x : {a, b}) h = (h ^ uint64_t(x)) * 0xff51afd7ed558ccdu, h ^= h >> 29;
  return h;
}
inline int64_t reduction(Element e, ReduceOp op) { return int64_t(e) * kReduceOps + int64_t(op); }

}  // namespace ckdist
