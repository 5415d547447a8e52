// One block of the KV cache for one kv-head, byte by byte. Private to isa/.
//
//   f32, f16, bf16   K [width][16 positions], V [16 positions][width]
//   i16, q8_0        codes in pairs, the operands of a dot product of 16-bit integers: K [width / 2][16 positions][2
//                    dimensions], V [8 pairs][width][2 positions].
//                    i16: int16 codes, one float scale; q8_0: int8 codes, a float16 scale for each group of 32
//                    dimensions, or for all of them where the width is not a multiple of 32
//
// A block is K, V, the scales of K, the scales of V, these [groups][16 positions] each. K and V may differ in type and
// width.
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

// Dimensions that share a scale: all of them but for q8_0.
CKDIST_INLINE int group_of(KvType type, int width) { return type == KvType::q8_0 && width % 32 == 0 ? 32 : width; }

struct BlockLayout {
  int k_group, v_group;
  int64_t v_offset, k_scales_offset, v_scales_offset, bytes;

  explicit BlockLayout(const CacheShape& cache)
      : k_group(group_of(cache.key_type, cache.key_width)), v_group(group_of(cache.value_type, cache.value_width)) {
    v_offset = code_bytes(cache.key_type) * kBlockTokens * cache.key_width;
    k_scales_offset = v_offset + code_bytes(cache.value_type) * kBlockTokens * cache.value_width;
    v_scales_offset = k_scales_offset + scale_bytes(cache.key_type) * kBlockTokens * (cache.key_width / k_group);
    bytes = v_scales_offset + scale_bytes(cache.value_type) * kBlockTokens * (cache.value_width / v_group);
    bytes = (bytes + 63) / 64 * 64;
  }
  static int64_t scale_bytes(KvType type) { return type == KvType::q8_0 ? 2 : type == KvType::i16 ? 4 : 0; }
};

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
