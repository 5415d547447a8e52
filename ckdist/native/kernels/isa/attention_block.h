// One block of the KV cache for one kv-head, byte by byte. Private to isa/.
//
//   f32, f16, bf16   K [head_dim][16 positions], V [16 positions][head_dim]
//   i16, q8_0        codes in pairs, the operands of a dot product of 16-bit integers: K [head_dim / 2][16 positions][2
//   dimensions],
//                    V [8 pairs][head_dim][2 positions]; then the scales of K and of V, each [groups][16 positions].
//                    i16: int16 codes, one float scale; q8_0: int8 codes, a float16 scale for each group of 32
//                    dimensions, or for all of them where head_dim is not a multiple of 32
//
// No score and no weighted sum needs a horizontal sum. A pair of codes also lies as one word that can be broadcast, so
// the same block serves lanes that are positions (few queries) and lanes that are queries (many).
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_VECTORS {

CKDIST_INLINE int64_t code_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::q8_0 ? 1 : 2; }
CKDIST_INLINE bool is_integer(KvType type) { return type == KvType::i16 || type == KvType::q8_0; }

struct BlockLayout {
  int group;  // dimensions that share a scale; head_dim but for q8_0
  int64_t v_offset, k_scales_offset, v_scales_offset, bytes;

  BlockLayout(KvType type, int head_dim) {
    group = type == KvType::q8_0 && head_dim % 32 == 0 ? 32 : head_dim;
    const int64_t tile = code_bytes(type) * kBlockTokens * head_dim;
    const int64_t scale_bytes = type == KvType::q8_0 ? 2 : type == KvType::i16 ? 4 : 0;
    const int64_t scales = scale_bytes * kBlockTokens * (head_dim / group);
    v_offset = tile;
    k_scales_offset = 2 * tile;
    v_scales_offset = 2 * tile + scales;
    bytes = 2 * tile + 2 * scales;
  }
};

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
