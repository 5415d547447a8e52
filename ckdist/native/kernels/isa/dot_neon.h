// Products of signed bytes in lanes of 32 bits, of four rows with one or a few tokens: by SMMLA if the level has it and
// tokens come in pairs, else by SDOT, else by products of 16 bits. All are exact, so that levels give the same bits.
// Private to isa/.
//
// Without either instruction, for a code w of the weights and a code x of the activations, -128 <= w <= 127 and |x| <=
// 127: products are added in 16 bits as long as they cannot overflow: two for codes of 8 bits, more for fewer bits.
#pragma once
#include <arm_neon.h>

#include "core/read_as.h"
#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kSteps = kGroupColumns / 4;  // of four columns each: a register holds one of four rows

// The offset of 8-bit codes is removed as they are read. Other codes are not negative.
template <Type type>
constexpr bool is_signed() {
  return layout_of(type).offset == kCodebookOffset;
}

inline int8x16_t read_columns(const uint8_t* x) { return vreinterpretq_s8_u8(vld1q_u8(x)); }
inline int32x4_t broadcast32(const uint8_t* at) { return vdupq_n_s32(read_as<int32_t>(at)); }

#if defined(__ARM_FEATURE_DOTPROD)

// sum + codes . x over four steps.
inline int32x4_t dot_four(int32x4_t sum, const int8x16_t* codes, const uint8_t* x) {
  const int8x16_t columns = read_columns(x);
  sum = vdotq_laneq_s32(sum, codes[0], columns, 0);
  sum = vdotq_laneq_s32(sum, codes[1], columns, 1);
  sum = vdotq_laneq_s32(sum, codes[2], columns, 2);
  return vdotq_laneq_s32(sum, codes[3], columns, 3);
}

template <Type, int steps>
inline int32x4_t add_products(int32x4_t sum, const int8x16_t* codes, const uint8_t* x) {
#pragma GCC unroll 2
  for (int s = 0; s < steps; s += 4) sum = dot_four(sum, codes + s, x + 4 * s);
  return sum;
}

// The minima of eight groups, for four rows in two registers, times the eight sums.
inline int32x4_t dot_minima(int8x16_t first, int8x16_t second, const uint8_t* sums) {
  const int8x16_t both = vcombine_s8(vreinterpret_s8_u8(vld1_u8(sums)), vdup_n_s8(0));
  return vdotq_laneq_s32(vdotq_laneq_s32(vdupq_n_s32(0), first, both, 0), second, both, 1);
}

#else

// Products of the same row and column of two registers, in 16 bits, for one or two steps.
struct Products {
  int16x8_t low, high;
};
inline Products multiply(int8x16_t a, int8x16_t b) {
  return {vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)};
}
inline void multiply_add(Products& sum, int8x16_t a, int8x16_t b) {
  sum.low = vmlal_s8(sum.low, vget_low_s8(a), vget_low_s8(b));
  sum.high = vmlal_high_s8(sum.high, a, b);
}
inline int8x16_t broadcast_step(const uint8_t* x) { return vreinterpretq_s8_s32(broadcast32(x)); }

// Number of steps whose products can be added in 16 bits.
template <Type type>
constexpr int steps_before_widening() {
  const int steps = 32767 / (127 * (is_signed<type>() ? 128 : layout_of(type).largest_code()));
  return steps >= 8 ? 8 : steps >= 4 ? 4 : 2;
}

template <Type type, int steps>
inline int32x4_t add_products(int32x4_t sum, const int8x16_t* codes, const uint8_t* x) {
  constexpr int run = steps_before_widening<type>() < steps ? steps_before_widening<type>() : steps;
  int32x4_t low = vdupq_n_s32(0), high = low;
#pragma GCC unroll 8
  for (int s = 0; s < steps; s += run) {
    Products products = multiply(codes[s], broadcast_step(x + 4 * s));
#pragma GCC unroll 8
    for (int i = 1; i < run; ++i) multiply_add(products, codes[s + i], broadcast_step(x + 4 * (s + i)));
    low = vpadalq_s16(low, products.low), high = vpadalq_s16(high, products.high);
  }
  return vaddq_s32(sum, vpaddq_s32(low, high));
}

// Minima have at most 6 bits.
inline int32x4_t dot_minima(int8x16_t first, int8x16_t second, const uint8_t* sums) {
  Products products = multiply(first, broadcast_step(sums));
  multiply_add(products, second, broadcast_step(sums + 4));
  return vpaddq_s32(vpaddlq_s16(products.low), vpaddlq_s16(products.high));
}

#endif

// Arranges the codes of 32 columns for products with `tokens` tokens. For SMMLA, two steps of four rows become eight
// columns of two rows each.
template <int tokens>
inline void arrange([[maybe_unused]] int8x16_t* codes) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (tokens > 1) {
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; s += 2) {
      const int32x4_t first = vreinterpretq_s32_s8(codes[s]), second = vreinterpretq_s32_s8(codes[s + 1]);
      codes[s] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      codes[s + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
    }
  }
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds products of two tokens with arranged codes.
template <int steps>
inline void add_products_of_two(int32x4_t* sums, const int8x16_t* codes, const uint8_t* x, const uint8_t* y) {
  int32x4_t low = vdupq_n_s32(0), high = low;  // rows 0 and 1, 2 and 3; two tokens each
#pragma GCC unroll 4
  for (int s = 0; s < steps; s += 2) {
    const int8x16_t columns = vreinterpretq_s8_u8(vcombine_u8(vld1_u8(x + 4 * s), vld1_u8(y + 4 * s)));
    low = vmmlaq_s32(low, codes[s], columns);
    high = vmmlaq_s32(high, codes[s + 1], columns);
  }
  sums[0] = vaddq_s32(sums[0], vuzp1q_s32(low, high));
  sums[1] = vaddq_s32(sums[1], vuzp2q_s32(low, high));
}
#endif

// sums[t] += codes . x of token t. The columns of token t are at x + t * stride bytes.
template <Type type, int steps, int tokens>
inline void add_products_of(int32x4_t* sums, const int8x16_t* codes, const uint8_t* x, int64_t stride) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (tokens > 1) {
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t += 2)
      add_products_of_two<steps>(sums + t, codes, x + t * stride, x + (t + 1) * stride);
    return;
  }
#endif
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t) sums[t] = add_products<type, steps>(sums[t], codes, x + t * stride);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
