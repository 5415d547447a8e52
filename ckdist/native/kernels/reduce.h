// Sums, maxima and minima of the ranks' values, element by element, and related copies.
//
// A fold processes its parts strictly from the first to the last. float32 and the 16-bit types are computed in float32
// and rounded once at the end to nearest even. A bfloat16 result below the normal range becomes zero (as in the CPUs'
// own conversion). int32 and int8 sums wrap around. If any part is NaN, the maximum and the minimum are NaN.
#pragma once
#include <cstdint>

namespace ckdist {

enum class Element : int32_t { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i8 = 4, byte = 5 };
enum class ReduceOp : int32_t { sum = 0, max = 1, min = 2 };
constexpr int kReduceTypes = 5, kReduceOps = 3;  // bytes cannot be reduced

inline int64_t element_bytes(Element e) {
  constexpr int64_t bytes[] = {4, 2, 2, 4, 1, 1};
  return bytes[static_cast<int>(e)];
}

// Writes the fold of `parts` to each of `outs`. An out may be one of the parts.
using Fold = void (*)(void* const* outs, int out_count, const void* const* parts, int part_count, int64_t elements);

struct ReduceKernel {
  Fold fold[kReduceTypes][kReduceOps];    // parts and outs of one type
  Fold widen[kReduceTypes][kReduceOps];   // 16-bit parts, float32 outs; other types as `fold`
  Fold narrow[kReduceTypes][kReduceOps];  // float32 parts, 16-bit outs; other types as `fold`
  // Copies, and also writes every cache line of `in` unchanged, so that this core owns it: see
  // comm/algorithms/shm_collectives.h.
  void (*take)(void* out, void* in, int64_t bytes);
  // Copies `line` to `out`, then `in` to `line`.
  void (*exchange)(void* out, void* line, const void* in, int64_t bytes);
  // Copies `in` to both and reads it once. `out` may be `in`.
  void (*copy_twice)(void* out, void* line, const void* in, int64_t bytes);
};

}  // namespace ckdist
