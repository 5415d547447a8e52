// Strips with AVX2 and FMA: 16 rows in two vectors ("halves"). Bytes are multiplied by dot.h. bfloat16 weights are
// expanded, which is exact.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/isa/tile_block.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Lanes of half `half` that are among the first `rows` of the tile.
inline __m256i row_mask(int rows, int half) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kPartRows * half));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(rows), lane);
}

// Rows of a half tile in y. Only a partial tile needs masks.
inline __m256 load_rows(const float* y, int rows, int half) {
  const float* const at = y + kPartRows * half;
  return rows == kTileRows ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, row_mask(rows, half));
}
inline void store_rows(float* y, int rows, int half, __m256 sums) {
  float* const at = y + kPartRows * half;
  if (rows == kTileRows) _mm256_storeu_ps(at, sums);
  else _mm256_maskstore_ps(at, row_mask(rows, half), sums);
}

template <int tokens>
inline void store_sums(const Strip& strip, const __m256 (*sums)[kParts]) {
  for (int h = 0; h < kParts; ++h)
    for (int t = 0; t < tokens; ++t) store_rows(strip.y + t * strip.y_stride, strip.rows, h, sums[t][h]);
}

// Keeps the compiler from computing every token's address before the loops.
inline void hide(int64_t& offset) { asm("" : "+r"(offset)); }

template <Type type>
inline __m256i halved(__m256i scale) {
  if constexpr (!is_doubled<type>()) return scale;
  return _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(scale), _mm256_set1_ps(0.5f)));
}

// Adds one token's 32 columns to its total: of the block if scales are integers, else of the row.
template <Type type, bool many>
inline __m256 add_group(const __m256i* codes, const __m256i* scale, const __m256i* minimum, const Columns& x,
                        int64_t row, __m256 total) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts(), steps = kSteps / parts;
  const PairScales<type, false> pairs(scale);
  const uint8_t* const sums = (parts == 1 ? x.sums32 : x.sums16) + row;
  __m256i whole = _mm256_setzero_si256();
  __m256 scaled = _mm256_setzero_ps();
#pragma GCC unroll 2
  for (int p = 0; p < parts; ++p) {
    __m256i product = layout.offset > 0 && !is_signed<type>() ? read_sums<type>(sums + 4 * p) : _mm256_setzero_si256();
    const uint8_t* const of_part = x.codes + row + 4 * p * steps;
    product = add_products<type, steps, many>(product, pairs.factor[p], codes + p * steps, of_part);
    if constexpr (layout.whole()) {
      const __m256i part = _mm256_mullo_epi32(product, scale[p]);
      whole = p == 0 ? part : _mm256_add_epi32(whole, part);
    } else {
      const __m256 part = _mm256_cvtepi32_ps(product), factor = _mm256_castsi256_ps(scale[p]);
      scaled = p == 0 ? _mm256_mul_ps(part, factor) : _mm256_fmadd_ps(part, factor, scaled);
      if constexpr (layout.minimum)
        scaled =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(read_sums<type>(sums + 4 * p)), _mm256_castsi256_ps(minimum[p]), scaled);
    }
  }
  if constexpr (layout.whole()) scaled = _mm256_cvtepi32_ps(whole);
  return _mm256_fmadd_ps(scaled, _mm256_castsi256_ps(broadcast32(x.scales + row)), total);
}

// True if several tokens are multiplied piece by piece. Without vpdpbusd, 8-bit codes are limited by arithmetic, and
// pieces would only cost the carried sums.
template <Type type>
constexpr bool in_pieces() {
  return !is_signed<type>() || layout_of(type).whole();
}

constexpr int kPieceSteps = kSteps / 2;

// Adds a sum of products of a token's half tile, times the scale and minimum of its part, to the sums of the parts
// before. `carried` passes a sum from the first piece to the second.
template <Type type, int piece, bool scales_pairs>
[[gnu::always_inline]] inline __m256 scale_sum(__m256i sum, __m256i scale, __m256i minimum, const uint8_t* sums_at,
                                               __m256i& carried) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int part = layout.parts() == 2 ? piece : 0;
  __m256 scaled;
  if constexpr (layout.whole()) {
    __m256i whole = scales_pairs ? sum : _mm256_mullo_epi32(sum, scale);
    if constexpr (!scales_pairs && part == 1) whole = _mm256_add_epi32(carried, whole);
    if constexpr (piece == 0) carried = whole;
    scaled = _mm256_cvtepi32_ps(whole);
  } else {
    const __m256 product = _mm256_cvtepi32_ps(sum), by = _mm256_castsi256_ps(scale);
    const __m256 of_sums = _mm256_cvtepi32_ps(read_sums<type>(sums_at));
    scaled = part == 0 ? _mm256_mul_ps(product, by) : _mm256_fmadd_ps(product, by, _mm256_castsi256_ps(carried));
    if constexpr (layout.minimum) scaled = _mm256_fmadd_ps(of_sums, _mm256_castsi256_ps(minimum), scaled);
    if constexpr (piece == 0) carried = _mm256_castps_si256(scaled);
  }
  return scaled;
}

// Multiplies a piece (half of 32 columns) of a few tokens, with the codes of both halves of the tile in registers, so
// that each load of a token is used twice. `carried` is a token's sum between the first piece and the second: of
// products in 16 or 32 bits, or of scaled products.
template <Type type, int piece, int tokens>
inline void add_piece(const uint8_t* at, int group, const Columns& x, int64_t stride, __m256i (*carried)[kParts],
                      __m256 (*total)[kParts]) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts(), part = parts == 2 ? piece : 0;
  constexpr bool scales_pairs = !kByteDot && layout.whole();  // sums of two products are scaled while widening
  constexpr bool starts = piece == 0 || (parts == 2 && !scales_pairs), ends = piece == 1 || parts == 2;
  constexpr int run = steps_before_widening<type>();
  constexpr bool carries_pairs = !kByteDot && parts == 1 && run > kPieceSteps;
  __m256i codes[kParts][kPieceSteps], scale[kParts], minimum[kParts], factor[kParts], of_sums[kParts];
#pragma GCC unroll 2
  for (int h = 0; h < kParts; ++h) {
    const Block<type> block = {at, h};
    const uint8_t* planes = block.planes(group);
    codes[h][0] = read_step<type, kPieceSteps * piece>(planes);
    codes[h][1] = read_step<type, kPieceSteps * piece + 1>(planes);
    codes[h][2] = read_step<type, kPieceSteps * piece + 2>(planes);
    codes[h][3] = read_step<type, kPieceSteps * piece + 3>(planes);
    __m256i scales[parts];
    for (int p = 0; p < parts; ++p) scales[p] = halved<type>(block.scale(group * parts + p));
    scale[h] = scales[part];
    minimum[h] = layout.minimum && !layout.whole() ? block.minimum(group * parts + part) : _mm256_setzero_si256();
    const PairScales<type, scales_pairs> pairs(scales);
    factor[h] = pairs.factor[part];
    of_sums[h] = pairs.of_sums;
  }
  const uint8_t* codes_at = x.codes + 4 * kPieceSteps * piece;
  const uint8_t* sums_at = parts == 1 ? x.sums32 : x.sums16 + sizeof(int32_t) * part;
  int64_t row = 0;
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t, row += stride) {
    hide(row);
    __m256i sum[kParts] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if constexpr (starts != carries_pairs) {
      if constexpr (scales_pairs && PairScales<type, scales_pairs>::offset)
        sum[0] = offset_products(of_sums[0], sums_at + row), sum[1] = offset_products(of_sums[1], sums_at + row);
      else if constexpr (layout.offset > 0 && !is_signed<type>()) sum[0] = sum[1] = read_sums<type>(sums_at + row);
    } else if constexpr (!carries_pairs) {
      sum[0] = carried[t][0], sum[1] = carried[t][1];
    }
    multiply_halves<type, carries_pairs, piece>(sum, carried[t], codes, factor, codes_at + row);
    if constexpr (!ends || (scales_pairs && piece == 0)) {
      if constexpr (!carries_pairs) carried[t][0] = sum[0], carried[t][1] = sum[1];
      continue;
    }
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      const __m256 scaled =
          scale_sum<type, piece, scales_pairs>(sum[h], scale[h], minimum[h], sums_at + row, carried[t][h]);
      if constexpr (piece == 0) continue;
      const __m256 of_token = _mm256_castsi256_ps(broadcast32(x.scales + row));
      total[t][h] = _mm256_fmadd_ps(scaled, of_token, total[t][h]);
    }
  }
}

// sum - (the block's minima times the token's sums).
inline __m256 add_minima(__m256 sum, const uint8_t* minima, __m256 block_minimum, const uint8_t* group_sums) {
  const __m256i first = load(minima), second = load(minima + 64);
  const __m256i high = dot_minima(first, group_sums, second, group_sums + 4),
                low = dot_minima(first, group_sums + 8, second, group_sums + 12);
  const __m256i both = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
  const __m256 factor = _mm256_mul_ps(block_minimum, _mm256_castsi256_ps(broadcast32(group_sums + 16)));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(both), factor, sum);
}

template <Type type, int tokens>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts();  // scales within 32 columns
  constexpr int groups = layout.columns / kGroupColumns, lines = (layout.bytes() / 64 + groups - 1) / groups;
  __m256 sums[tokens][kParts];
  for (int t = 0; t < tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
  const uint8_t* at = strip.tile;
  Columns x = Columns::of(strip.x, strip.padded, strip.column);
  const uint8_t* group_sums = Columns::group_sums(strip.x, strip.padded, strip.column);
  ExpandedBlocks<type> expanded;
  expanded.begin(strip.tile, strip.expand, strip.block_bytes);
  for (int64_t b = 0; b < strip.blocks; ++b, at += layout.bytes()) {
    if constexpr (expanded.used) at = expanded.template next<tokens>();
    __m256 of_block[tokens][kParts];
    if constexpr (layout.whole())
      for (int t = 0; t < tokens; ++t) of_block[t][0] = of_block[t][1] = _mm256_setzero_ps();
    auto* const total = layout.whole() ? of_block : sums;
    for (int g = 0; g < groups; ++g) {
      if constexpr (!expanded.used) fetch<type, tokens>(at + 64 * g * lines, lines);
      if constexpr (tokens > 1 && in_pieces<type>()) {
        __m256i carried[tokens][kParts];
        add_piece<type, 0, tokens>(at, g, x, strip.x_stride, carried, total);
        add_piece<type, 1, tokens>(at, g, x, strip.x_stride, carried, total);
      } else {
#pragma GCC unroll 2
        for (int h = 0; h < kParts; ++h) {
          const Block<type> block = {at, h};
          const uint8_t* planes = block.planes(g);
          const __m256i codes[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes),
                                         read_step<type, 2>(planes), read_step<type, 3>(planes),
                                         read_step<type, 4>(planes), read_step<type, 5>(planes),
                                         read_step<type, 6>(planes), read_step<type, 7>(planes)};
          __m256i scale[parts], minimum[parts];
          for (int p = 0; p < parts; ++p) {
            scale[p] = halved<type>(block.scale(g * parts + p));
            minimum[p] = layout.minimum && !layout.whole() ? block.minimum(g * parts + p) : _mm256_setzero_si256();
          }
          int64_t row = 0;
#pragma GCC unroll 8
          for (int t = 0; t < tokens; ++t, row += strip.x_stride) {
            if (tokens > 1) hide(row);
            total[t][h] = add_group<type, (tokens > 1)>(codes, scale, minimum, x, row, total[t][h]);
          }
        }
      }
      x.skip(1);
    }
    for (int h = 0; h < kParts; ++h) {
      const Block<type> block = {at, h};
      if constexpr (layout.whole())
        for (int t = 0; t < tokens; ++t) sums[t][h] = _mm256_fmadd_ps(of_block[t][h], block.block_scale(), sums[t][h]);
      if constexpr (layout.scales == ScaleKind::unsigned_byte)
        for (int t = 0; t < tokens; ++t)
          sums[t][h] =
              add_minima(sums[t][h], block.byte_minima(), block.block_minimum(), group_sums + t * strip.x_stride);
    }
    group_sums += sizeof(GroupSums);
  }
  store_sums<tokens>(strip, sums);
}

// Weights of one column, for 8 rows.
template <Type type>
inline __m256 read_column(const uint8_t* block, int column, int half) {
  if constexpr (type == Type::f32) return _mm256_castsi256_ps(load(block + 64 * column + 32 * half));
  if constexpr (type == Type::f16) return read_halves(block + 32 * column + 16 * half);
  const __m256i pairs = load(block + 64 * (column / 2) + 32 * half);
  return _mm256_castsi256_ps(column % 2 ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000))
                                        : _mm256_slli_epi32(pairs, 16));
}

template <Type type, int tokens>
void float_strip(const Strip& strip) {
  constexpr int block_bytes = kFloatColumnPad * kTileRows * (type == Type::f32 ? 4 : 2);
  __m256 sums[tokens][kParts];
  for (int t = 0; t < tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
  const uint8_t* block = strip.tile;
  const uint8_t* x = strip.x;
  for (int64_t b = 0; b < strip.blocks; ++b, block += block_bytes, x += 4 * kFloatColumnPad) {
    fetch<type, tokens>(block, block_bytes / 64);
#pragma GCC unroll 16
    for (int c = 0; c < kFloatColumnPad; ++c) {
      const __m256 top = read_column<type>(block, c, 0), bottom = read_column<type>(block, c, 1);
#pragma GCC unroll 6
      for (int t = 0; t < tokens; ++t) {
        const __m256 value = _mm256_castsi256_ps(broadcast32(x + t * strip.x_stride + 4 * c));
        sums[t][0] = _mm256_fmadd_ps(top, value, sums[t][0]);
        sums[t][1] = _mm256_fmadd_ps(bottom, value, sums[t][1]);
      }
    }
  }
  store_sums<tokens>(strip, sums);
}

template <Type type>
struct Product {
  static constexpr Type kType = type;
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;
  // Sums of floats fit the 16 registers; for bytes, the codes do.
  static constexpr int kMostTokens = layout.columns ? 8 : 6;

  template <int tokens>
  static constexpr StripFunction of() {
    if constexpr (layout.columns > 0) return {tokens, 1, block_strip<form_of(type), tokens>};
    else return {tokens, 1, float_strip<type, tokens>};
  }

  static StripFunction strip(int64_t tokens, int64_t) {
    static constexpr StripFunction sizes[5] = {{}, of<1>(), of<2>(), of<3>(), of<4>()};
    return tokens >= kMostTokens ? of<kMostTokens>() : sizes[tokens < 4 ? tokens : 4];
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
