// One block of the KV cache for one kv-head, byte by byte, and sixteen elements of it as floats. Private to isa/.
//
//   f32, f16, bf16   K [head_dim][16 positions], V [16 positions][head_dim]
//   q8_0             the same as int8 codes, then float16 scales of K and of V, each [groups][16 positions];
//                    a group is 32 dimensions, or all of them where head_dim is not a multiple of 32
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {

CKDIST_INLINE int64_t code_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::q8_0 ? 1 : 2; }

struct BlockLayout {
  int group;  // dimensions that share a scale; head_dim for the types without scales
  int64_t v_offset, k_scales_offset, v_scales_offset, bytes;

  BlockLayout(KvType type, int head_dim) {
    const bool scaled = type == KvType::q8_0;
    group = scaled && head_dim % 32 == 0 ? 32 : head_dim;
    const int64_t tile = code_bytes(type) * kBlockTokens * head_dim;
    const int64_t scales = scaled ? int64_t{2} * kBlockTokens * (head_dim / group) : 0;
    v_offset = tile;
    k_scales_offset = 2 * tile;
    v_scales_offset = 2 * tile + scales;
    bytes = 2 * tile + 2 * scales;
  }
};

// Elements [index, index + 16) of a tile, without their scale.
template <KvType type>
CKDIST_INLINE Vec load_codes(const uint8_t* tile, int64_t index) {
  if constexpr (type == KvType::f32) return load(reinterpret_cast<const float*>(tile) + index);
  if constexpr (type == KvType::f16) return load_f16(reinterpret_cast<const uint16_t*>(tile) + index);
  if constexpr (type == KvType::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(tile) + index);
  if constexpr (type == KvType::q8_0) return load_i8(reinterpret_cast<const int8_t*>(tile) + index);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
