// Sixteen int32 lanes in four registers of NEON. Private to integers.h.
#pragma once
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {

struct Nibbles;  // of integers.h

struct Ints {
  int32x4_t v[kParts];
};

#define CKDIST_EACH_INTS(expression)                        \
  Ints out;                                                 \
  for (int i = 0; i < kParts; ++i) out.v[i] = (expression); \
  return out

CKDIST_INLINE Ints zeros() { CKDIST_EACH_INTS(vdupq_n_s32(0)); }
CKDIST_INLINE Ints load_pairs(const int16_t* p) { CKDIST_EACH_INTS(vreinterpretq_s32_s16(vld1q_s16(p + 8 * i))); }
CKDIST_INLINE Ints load_pairs(const int8_t* p) {
  CKDIST_EACH_INTS(vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p + 8 * i))));
}
CKDIST_INLINE Ints load_pairs(const Nibbles* p) {
  const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(p)), one = vdupq_n_s8(1);
  // Shifts keep the sign, and the last bit is 1 in all codes.
  const int8x16_t low = vorrq_s8(vshrq_n_s8(vshlq_n_s8(bytes, 4), 3), one), high = vorrq_s8(vshrq_n_s8(bytes, 3), one);
  const int8x16_t first = vzip1q_s8(low, high), last = vzip2q_s8(low, high);
  return {{vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(first))), vreinterpretq_s32_s16(vmovl_high_s8(first)),
           vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(last))), vreinterpretq_s32_s16(vmovl_high_s8(last))}};
}
CKDIST_INLINE void store_pairs(int16_t* p, Ints a) {
  for (int i = 0; i < kParts; ++i) vst1q_s16(p + 8 * i, vreinterpretq_s16_s32(a.v[i]));
}
CKDIST_INLINE Ints set_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  CKDIST_EACH_INTS(vdupq_n_s32(pair));
}
CKDIST_INLINE int32x4_t dot_pairs(int32x4_t sum, int16x8_t a, int16x8_t b) {
  return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}
CKDIST_INLINE Ints dot(Ints sum, Ints a, Ints b) {
  CKDIST_EACH_INTS(dot_pairs(sum.v[i], vreinterpretq_s16_s32(a.v[i]), vreinterpretq_s16_s32(b.v[i])));
}
CKDIST_INLINE Vec to_floats(Ints a) { CKDIST_EACH_PART(vcvtq_f32_s32(a.v[i])); }
CKDIST_INLINE Ints round_pairs(Vec even, Vec odd) {
  CKDIST_EACH_INTS(vorrq_s32(vcvtnq_s32_f32(even.v[i]), vshlq_n_s32(vcvtnq_s32_f32(odd.v[i]), 16)));
}
CKDIST_INLINE void store_i16(int16_t* p, Vec a) {
  for (int i = 0; i < kParts; ++i) vst1_s16(p + kPartLanes * i, vqmovn_s32(vcvtnq_s32_f32(a.v[i])));
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
