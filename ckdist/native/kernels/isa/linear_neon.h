// Strips with NEON: 16 rows in four quarters. Bytes are multiplied by dot_neon.h. Sums are fused and in the order of
// the other levels, for every number of tokens. bfloat16 is expanded, which is exact, or multiplied in pairs if the
// level has BFDOT.
//
// BFDOT and BFMMLA round as the architecture defines without extended bfloat16 (FPCR.EBF = 0; "BFDotAdd" in Arm's
// reference manual): each product and the sum of two are rounded to odd, and so is their addition to the lane. Denormal
// inputs are used; denormal results become zero. BFMMLA adds its four columns like two BFDOTs, one after the other, so
// that one token and two tokens have the same bits.
#pragma once
#include "kernels/half.h"
#include "kernels/isa/tile_block.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kBf16Dot = true;
#else
constexpr bool kBf16Dot = false;
#endif
static_assert(kBf16Dot == kFormats.bf16_pairs);

template <int tokens>
inline void store_sums(const Strip& strip, const float32x4_t (*sums)[kParts]) {
  for (int t = 0; t < tokens; ++t) {
    float lanes[kTileRows];
    for (int q = 0; q < kParts; ++q) vst1q_f32(lanes + kPartRows * q, sums[t][q]);
    __builtin_memcpy(strip.y + t * strip.y_stride, lanes, strip.rows * sizeof(float));
  }
}

template <Type type>
inline int32x4_t read_sums(const uint8_t* at) {
  const int32x4_t sums = broadcast32(at);
  if constexpr (sums_shift<type>() < 0) return vshlq_n_s32(sums, -sums_shift<type>());
  if constexpr (sums_shift<type>() > 0) return vshrq_n_s32(sums, sums_shift<type>());
  return sums;
}

// Adds 32 columns of a few tokens to their totals of one quarter: of the block if scales are integers, else of the row.
// A token's totals are kParts apart in `total`.
template <Type type, int tokens>
inline void add_group(const int8x16_t* codes, const int32x4_t* scale, const int32x4_t* minimum, const Columns& x,
                      int64_t stride, float32x4_t (*total)[kParts], int quarter) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts(), steps = kSteps / parts;
  const uint8_t* const sums = parts == 1 ? x.sums32 : x.sums16;
  int32x4_t whole[tokens];
  float32x4_t scaled[tokens];
#pragma GCC unroll 2
  for (int p = 0; p < parts; ++p) {
    int32x4_t product[tokens];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t)
      product[t] =
          layout.offset > 0 && !is_signed<type>() ? read_sums<type>(sums + t * stride + 4 * p) : vdupq_n_s32(0);
    add_products_of<type, steps, tokens>(product, codes + p * steps, x.codes + 4 * p * steps, stride);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      if constexpr (layout.whole()) {
        whole[t] = p == 0 ? vmulq_s32(product[t], scale[p]) : vmlaq_s32(whole[t], product[t], scale[p]);
      } else {
        const float32x4_t part = vcvtq_f32_s32(product[t]), factor = as_floats(scale[p]);
        scaled[t] = p == 0 ? vmulq_f32(part, factor) : vfmaq_f32(scaled[t], part, factor);
        if constexpr (layout.minimum)
          scaled[t] =
              vfmaq_f32(scaled[t], vcvtq_f32_s32(read_sums<type>(sums + t * stride + 4 * p)), as_floats(minimum[p]));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t) {
    if constexpr (layout.whole()) scaled[t] = vcvtq_f32_s32(whole[t]);
    total[t][quarter] = vfmaq_f32(total[t][quarter], scaled[t], as_floats(broadcast32(x.scales + t * stride)));
  }
}

// sum - (the block's minima times the token's sums).
inline float32x4_t add_minima(float32x4_t sum, const uint8_t* minima, float32x4_t block_minimum,
                              const uint8_t* group_sums) {
  const int8x16_t first = read_columns(minima), second = read_columns(minima + 64);
  const int32x4_t high = dot_minima(first, second, group_sums), low = dot_minima(first, second, group_sums + 8);
  const float32x4_t factor = vmulq_f32(block_minimum, as_floats(broadcast32(group_sums + 16)));
  return vfmaq_f32(sum, vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low)), factor);
}

template <Type type, int tokens>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts();  // scales within 32 columns
  constexpr int groups = layout.columns / kGroupColumns, lines = (layout.bytes() / 64 + groups - 1) / groups;
  float32x4_t sums[tokens][kParts];
  for (int t = 0; t < tokens; ++t)
    for (int q = 0; q < kParts; ++q) sums[t][q] = vdupq_n_f32(0.0f);
  const uint8_t* at = strip.tile;
  Columns x = Columns::of(strip.x, strip.padded, strip.column);
  const uint8_t* group_sums = Columns::group_sums(strip.x, strip.padded, strip.column);
  ExpandedBlocks<type> expanded;
  expanded.begin(strip.tile, strip.expand, strip.block_bytes);
  for (int64_t b = 0; b < strip.blocks; ++b, at += layout.bytes()) {
    if constexpr (expanded.used) at = expanded.template next<tokens>();
    float32x4_t of_block[tokens][kParts];
    if constexpr (layout.whole())
      for (int t = 0; t < tokens; ++t)
        for (int q = 0; q < kParts; ++q) of_block[t][q] = vdupq_n_f32(0.0f);
    auto* const total = layout.whole() ? of_block : sums;
    for (int g = 0; g < groups; ++g) {
      if constexpr (!expanded.used) fetch<type, tokens>(at + 64 * g * lines, lines);
      for (int q = 0; q < kParts; ++q) {
        const Block<type> block = {at, q};
        const uint8_t* planes = block.planes(g);
        int8x16_t codes[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes), read_step<type, 2>(planes),
                                   read_step<type, 3>(planes), read_step<type, 4>(planes), read_step<type, 5>(planes),
                                   read_step<type, 6>(planes), read_step<type, 7>(planes)};
        arrange<tokens>(codes);
        int32x4_t scale[parts], minimum[parts];
        for (int p = 0; p < parts; ++p) {
          scale[p] = block.scale(g * parts + p);
          minimum[p] = layout.minimum && !layout.whole() ? block.minimum(g * parts + p) : vdupq_n_s32(0);
        }
        add_group<type, tokens>(codes, scale, minimum, x, strip.x_stride, total, q);
      }
      x.skip(1);
    }
    for (int q = 0; q < kParts; ++q) {
      const Block<type> block = {at, q};
      if constexpr (layout.whole())
        for (int t = 0; t < tokens; ++t) sums[t][q] = vfmaq_f32(sums[t][q], of_block[t][q], block.block_scale());
      if constexpr (layout.scales == ScaleKind::unsigned_byte)
        for (int t = 0; t < tokens; ++t)
          sums[t][q] =
              add_minima(sums[t][q], block.byte_minima(), block.block_minimum(), group_sums + t * strip.x_stride);
    }
    group_sums += sizeof(GroupSums);
  }
  store_sums<tokens>(strip, sums);
}

// Weights of one column, for 4 rows.
template <Type type>
inline float32x4_t read_column(const uint8_t* block, int column, int quarter) {
  if constexpr (type == Type::f32) return vreinterpretq_f32_u8(vld1q_u8(block + 64 * column + 16 * quarter));
  if constexpr (type == Type::f16) return read_halves(block + 32 * column + 8 * quarter);
  const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(block + 64 * (column / 2) + 16 * quarter));
  return vreinterpretq_f32_u32(column % 2 ? vandq_u32(pairs, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(pairs, 16));
}

template <Type type, int tokens>
void float_strip(const Strip& strip) {
  constexpr int block_bytes = kFloatColumnPad * kTileRows * (type == Type::f32 ? 4 : 2);
  float32x4_t sums[tokens][kParts];
  for (int t = 0; t < tokens; ++t)
    for (int q = 0; q < kParts; ++q) sums[t][q] = vdupq_n_f32(0.0f);
  const uint8_t* block = strip.tile;
  const uint8_t* x = strip.x;
  for (int64_t b = 0; b < strip.blocks; ++b, block += block_bytes, x += 4 * kFloatColumnPad) {
    fetch<type, tokens>(block, block_bytes / 64);
#pragma GCC unroll 16
    for (int c = 0; c < kFloatColumnPad; ++c) {
      float32x4_t values[tokens];
#pragma GCC unroll 4
      for (int t = 0; t < tokens; ++t) values[t] = as_floats(broadcast32(x + t * strip.x_stride + 4 * c));
#pragma GCC unroll 4
      for (int q = 0; q < kParts; ++q) {
        const float32x4_t weights = read_column<type>(block, c, q);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; ++t) sums[t][q] = vfmaq_f32(sums[t][q], weights, values[t]);
      }
    }
  }
  store_sums<tokens>(strip, sums);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline bfloat16x8_t as_bf16(uint8x16_t v) { return vreinterpretq_bf16_u8(v); }

// One token: a register of weights has two columns of four rows.
inline void bf16_strip_of_one(const Strip& strip) {
  float32x4_t sums[1][kParts];
  for (int q = 0; q < kParts; ++q) sums[0][q] = vdupq_n_f32(0.0f);
  const uint8_t *tile = strip.tile, *x = strip.x;
  for (int64_t left = strip.blocks * kFloatColumnPad / 2; left > 0; --left, tile += 64, x += 4)
#pragma GCC unroll 4
    for (int q = 0; q < kParts; ++q)
      sums[0][q] = vbfdotq_f32(sums[0][q], as_bf16(vld1q_u8(tile + 16 * q)), vreinterpretq_bf16_s32(broadcast32(x)));
  store_sums<1>(strip, sums);
}

// Tokens in pairs: four columns of two rows by four columns of two tokens.
template <int tokens>
void bf16_strip(const Strip& strip) {
  if constexpr (tokens == 1) return bf16_strip_of_one(strip);
  // [row of two][token of two], for the first two rows and for the others.
  float32x4_t sums[tokens / 2][kParts][2];
  for (int t = 0; t < tokens / 2; ++t)
    for (int q = 0; q < kParts; ++q) sums[t][q][0] = sums[t][q][1] = vdupq_n_f32(0.0f);
  const uint8_t *tile = strip.tile, *x = strip.x;
  for (int64_t left = strip.blocks * kFloatColumnPad / 4; left > 0; --left, tile += 128, x += 8) {
    fetch<Type::bf16, tokens>(tile, 2);
#pragma GCC unroll 4
    for (int q = 0; q < kParts; ++q) {
      const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(tile + 16 * q)),
                       second = vreinterpretq_u32_u8(vld1q_u8(tile + 64 + 16 * q));
      const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second)),
                         high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 2
      for (int t = 0; t < tokens / 2; ++t) {
        const uint8_t* const row = x + 2 * t * strip.x_stride;
        const bfloat16x8_t columns = as_bf16(vcombine_u8(vld1_u8(row), vld1_u8(row + strip.x_stride)));
        sums[t][q][0] = vbfmmlaq_f32(sums[t][q][0], low, columns);
        sums[t][q][1] = vbfmmlaq_f32(sums[t][q][1], high, columns);
      }
    }
  }
  float32x4_t of_tokens[tokens][kParts];
  for (int t = 0; t < tokens / 2; ++t)
    for (int q = 0; q < kParts; ++q) {
      of_tokens[2 * t][q] = vuzp1q_f32(sums[t][q][0], sums[t][q][1]);
      of_tokens[2 * t + 1][q] = vuzp2q_f32(sums[t][q][0], sums[t][q][1]);
    }
  store_sums<tokens>(strip, of_tokens);
}
#endif

template <Type type>
struct Product {
  static constexpr Type kType = type;
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;

  template <int tokens>
  static constexpr StripFunction of() {
    if constexpr (layout.columns > 0) return {tokens, 1, block_strip<form_of(type), tokens>};
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    else if constexpr (type == Type::bf16) return {tokens, 1, bf16_strip<tokens>};
#endif
    else return {tokens, 1, float_strip<type, tokens>};
  }

  static StripFunction strip(int64_t tokens, int64_t) {
    if (layout.columns > 0 && tokens >= 8) return of<layout.columns ? 8 : 4>();
    return tokens >= 4 ? of<4>() : tokens >= 2 ? of<2>() : of<1>();
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
