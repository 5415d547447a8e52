// One block of the KV cache for one kv-head, byte by byte. Private to isa/.
//
// f32, f16, bf16   K [width][16 positions], V [16 positions][width]
// i16, q8_0, q4_0  codes in pairs, the operands of a dot product of 16-bit integers: K [width / 2][16 positions][2
// dimensions], V [8 pairs][width][2 positions]. i16: int16 codes, one float scale. q8_0, q4_0: a float16 scale for each
// group of 32 dimensions, or one for all if the width is not a multiple of 32. q8_0: int8 codes. q4_0: a pair is a
// byte, its low half first, and a half n from -8 to 7 is the code 2 n + 1.
//
// A block is K, V, the scales of K, the scales of V; scales are [groups][16 positions]. K and V may differ in type and
// width. A latent cache has only K; its values' groups are the first of K's, and the elements after the values begin a
// new group.
//
// No score and no weighted sum needs a horizontal sum. A pair of codes is also one word that can be broadcast. So the
// same block serves lanes that are positions (few queries) and lanes that are queries (many queries).
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_VECTORS {

CKDIST_INLINE bool is_small(KvType type) { return type == KvType::q8_0 || type == KvType::q4_0; }
CKDIST_INLINE bool is_integer(KvType type) { return type == KvType::i16 || is_small(type); }
// `count` is even.
CKDIST_INLINE int64_t code_bytes(KvType type, int64_t count) {
  if (type == KvType::q4_0) return count / 2;
  return count * (type == KvType::f32 ? 4 : type == KvType::q8_0 ? 1 : 2);
}

// Number of dimensions that share a scale: all, except for q8_0 and q4_0.
CKDIST_INLINE int group_of(KvType type, int width) { return is_small(type) && width % 32 == 0 ? 32 : width; }

CKDIST_INLINE int key_group(const CacheShape& cache) {
  return group_of(cache.key_type, cache.latent ? cache.value_width : cache.key_width);
}
CKDIST_INLINE int key_groups(const CacheShape& cache) {
  return (cache.key_width + key_group(cache) - 1) / key_group(cache);
}

struct BlockLayout {
  int k_group, v_group;
  int64_t v_offset, k_scales_offset, v_scales_offset, bytes;

  explicit BlockLayout(const CacheShape& cache)
      : k_group(key_group(cache)), v_group(group_of(cache.value_type, cache.value_width)) {
    v_offset = code_bytes(cache.key_type, int64_t{kBlockTokens} * cache.key_width);
    const int values = cache.latent ? 0 : cache.value_width;
    k_scales_offset = v_offset + code_bytes(cache.value_type, int64_t{kBlockTokens} * values);
    v_scales_offset = k_scales_offset + scale_bytes(cache.key_type) * kBlockTokens * key_groups(cache);
    bytes = v_scales_offset + scale_bytes(cache.value_type) * kBlockTokens * (values / v_group);
    if (cache.latent) v_offset = 0, v_scales_offset = k_scales_offset;
    bytes = (bytes + 63) / 64 * 64;
  }
  static int64_t scale_bytes(KvType type) { return is_small(type) ? 2 : type == KvType::i16 ? 4 : 0; }
};

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
