// Four float lanes in a NEON register; simd.h combines four of them. Products are fused. Conversions round and keep NaN
// as those of AVX2 do, so that levels of both give the same bits. Private to simd.h.
#pragma once
#include <arm_neon.h>

namespace ckdist {
namespace CKDIST_VECTORS {

using Part = float32x4_t;
using PartMask = uint32x4_t;
constexpr int kPartLanes = 4;

CKDIST_INLINE uint32x4_t part_bits(Part a) { return vreinterpretq_u32_f32(a); }
CKDIST_INLINE Part part_of_bits(uint32x4_t a) { return vreinterpretq_f32_u32(a); }

CKDIST_INLINE Part part_load(const float* p) { return vld1q_f32(p); }
CKDIST_INLINE void part_store(float* p, Part a) { vst1q_f32(p, a); }
CKDIST_INLINE Part part_set(float x) { return vdupq_n_f32(x); }
CKDIST_INLINE Part part_fma(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }
CKDIST_INLINE Part part_fnma(Part a, Part b, Part c) { return vfmsq_f32(c, a, b); }
CKDIST_INLINE Part part_min(Part a, Part b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
CKDIST_INLINE Part part_max(Part a, Part b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
CKDIST_INLINE Part part_truncate(Part a) { return vrndq_f32(a); }
CKDIST_INLINE PartMask part_less(Part a, Part b) { return vcltq_f32(a, b); }
CKDIST_INLINE Part part_select(PartMask m, Part a, Part b) { return vbslq_f32(m, a, b); }
CKDIST_INLINE Part part_copy_sign(Part magnitude, Part sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
CKDIST_INLINE Part part_add_exponent(Part a, Part power) {
  return part_of_bits(vaddq_u32(part_bits(a), vshlq_n_u32(part_bits(power), 23)));
}
CKDIST_INLINE Part part_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
CKDIST_INLINE Part part_bf16(const uint16_t* p) { return part_of_bits(vshll_n_u16(vld1_u16(p), 16)); }
CKDIST_INLINE Part part_i8(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
CKDIST_INLINE void part_store_f16(uint16_t* p, Part a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

// Rounds to bfloat16, nearest even; NaN stays NaN. BFCVTN gives the same bits as the shifts, for denormals too.
CKDIST_INLINE uint16x4_t part_to_bf16(Part a) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vreinterpret_u16_bf16(vcvt_bf16_f32(a));
#else
  const uint32x4_t bits = part_bits(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
#endif
}
CKDIST_INLINE void part_store_bf16(uint16_t* p, Part a) { vst1_u16(p, part_to_bf16(a)); }
CKDIST_INLINE void part_load_pairs(const uint16_t* p, Part* even, Part* odd) {
  const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(p));
  *even = part_of_bits(vshlq_n_u32(pairs, 16)), *odd = part_of_bits(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}
CKDIST_INLINE Part part_pairs(Part a, Part b) {
  const uint16x4_t low = part_to_bf16(a), high = part_to_bf16(b);
  return vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high)));
}
CKDIST_INLINE Part part_flush(Part a) {
  const uint32x4_t small = vceqzq_u32(vandq_u32(part_bits(a), vdupq_n_u32(0x7f800000)));
  return part_of_bits(vbicq_u32(part_bits(a), vandq_u32(small, vdupq_n_u32(0x7fffffff))));
}
CKDIST_INLINE Part part_rounded_to_bf16(Part a) { return part_of_bits(vshll_n_u16(part_to_bf16(a), 16)); }
template <bool>
CKDIST_INLINE Part part_number_pairs(Part a, Part b) {
  return part_pairs(part_flush(a), part_flush(b));
}
CKDIST_INLINE bool part_any_nan(Part, Part) { return false; }  // part_number_pairs keeps them
CKDIST_INLINE void part_store_i8(int8_t* p, Part a) {
  const int16x4_t halves = vqmovn_s32(vcvtnq_s32_f32(a));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(halves, halves))), 0);
  std::memcpy(p, &four, 4);
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
