// Strips with AVX-512: 16 rows in one vector. Bytes are multiplied by dot.h, bfloat16 in pairs or expanded
// (panel_avx512.h). A strip holds the codes of 32 columns in registers for all its tokens. Sums use explicit fused
// operations, the same for every number of tokens.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 emits it for its own undefined vectors
#include <immintrin.h>

#include "kernels/isa/panel_avx512.h"
#include "kernels/isa/tile_block.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

static_assert(kBf16Dot == kFormats.bf16_pairs);

template <int tokens>
inline void store_sums(float* y, int64_t y_stride, int rows, const __m512* sums) {
  const __mmask16 mask = static_cast<__mmask16>((1u << rows) - 1);
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) _mm512_mask_storeu_ps(y + t * y_stride, mask, sums[t]);
}

// Number of tokens whose chains of additions are interleaved, to hide their latencies.
constexpr int lanes_of(int tokens) { return tokens % 4 == 0 ? 4 : tokens % 3 == 0 ? 3 : tokens; }

// Keeps the compiler from computing every token's address before the loops: the addresses would not fit the registers.
inline void hide(int64_t& offset) { asm("" : "+r"(offset)); }

template <Type type>
inline __m512i halved(__m512i scale) {
  if constexpr (!is_doubled<type>()) return scale;
  return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(scale), _mm512_set1_ps(0.5f)));
}

// Adds 32 columns to the totals of a few tokens: of the block if scales are integers, else of the row.
template <Type type, int lanes>
inline void add_group(const __m512i* codes, const __m512i* scale, const PairScales<type>& pairs, const __m512i* minimum,
                      const Columns& x, int64_t row, int64_t stride, __m512* total) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts(), steps = kSteps / parts;
  const uint8_t* const sums = parts == 1 ? x.sums32 : x.sums16;
  __m512i whole[lanes];
  __m512 scaled[lanes];
#pragma GCC unroll 2
  for (int p = 0; p < parts; ++p) {
    __m512i product[lanes];
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l)
      product[l] = layout.offset > 0 && !is_signed<type>() && (kByteDot || !layout.whole())
                       ? read_sums<type>(sums + row + l * stride + 4 * p)
                       : _mm512_setzero_si512();
    if constexpr (kByteDot) {
#pragma GCC unroll 8
      for (int s = p * steps; s < (p + 1) * steps; ++s)
#pragma GCC unroll 4
        for (int l = 0; l < lanes; ++l)
          product[l] = dot_bytes(product[l], codes[s], x.codes + row + l * stride + 4 * s);
    } else {
#pragma GCC unroll 4
      for (int l = 0; l < lanes; ++l) {
        if constexpr (layout.whole()) {
          if (p > 0) product[l] = whole[l];
          else if constexpr (PairScales<type>::offset)
            product[l] = offset_products(pairs.of_sums, sums + row + l * stride);
        }
        product[l] = add_products<type, steps, true>(product[l], pairs.factor[p], codes + p * steps,
                                                     x.codes + row + l * stride + 4 * p * steps);
      }
    }
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) {
      if constexpr (layout.whole()) {
        const __m512i part = kByteDot ? _mm512_mullo_epi32(product[l], scale[p]) : product[l];
        whole[l] = p == 0 || !kByteDot ? part : _mm512_add_epi32(whole[l], part);
      } else {
        const __m512 part = _mm512_cvtepi32_ps(product[l]), factor = _mm512_castsi512_ps(scale[p]);
        scaled[l] = p == 0 ? _mm512_mul_ps(part, factor) : _mm512_fmadd_ps(part, factor, scaled[l]);
        if constexpr (layout.minimum)
          scaled[l] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(read_sums<type>(sums + row + l * stride + 4 * p)),
                                      _mm512_castsi512_ps(minimum[p]), scaled[l]);
      }
    }
  }
#pragma GCC unroll 4
  for (int l = 0; l < lanes; ++l) {
    if constexpr (layout.whole()) scaled[l] = _mm512_cvtepi32_ps(whole[l]);
    total[l] = _mm512_fmadd_ps(scaled[l], _mm512_castsi512_ps(broadcast32(x.scales + row + l * stride)), total[l]);
  }
}

// sum - (the block's minima times the token's sums).
inline __m512 add_minima(__m512 sum, const __m512i* minima, __m512 block_minimum, const uint8_t* group_sums) {
  const __m512i high = dot_minima(minima[0], group_sums, minima[1], group_sums + 4);
  const __m512i low = dot_minima(minima[0], group_sums + 8, minima[1], group_sums + 12);
  const __m512 factor = _mm512_mul_ps(block_minimum, _mm512_castsi512_ps(broadcast32(group_sums + 16)));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)), factor, sum);
}

// Reads several tiles in turn, one group of columns of each: memory is faster with accesses to two places at once.
template <Type type, int tokens, int tiles>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts();  // scales within 32 columns
  constexpr int groups = layout.columns / kGroupColumns, lines = (layout.bytes() / 64 + groups - 1) / groups,
                lanes = lanes_of(tokens);
  __m512 sums[tiles][tokens];  // for integer scales only used between blocks, so not in registers
  Block<type> block[tiles];
  ExpandedBlocks<type> expanded[tiles];
#pragma GCC unroll 2
  for (int i = 0; i < tiles; ++i) {
    block[i].at = strip.tile + i * strip.tile_bytes;
    expanded[i].begin(block[i].at, strip.expand, strip.block_bytes);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) sums[i][t] = _mm512_setzero_ps();
  }
  Columns x = Columns::of(strip.x, strip.padded, strip.column);
  const uint8_t* group_sums = Columns::group_sums(strip.x, strip.padded, strip.column);
  for (int64_t b = 0; b < strip.blocks; ++b) {
    __m512 of_block[tiles][tokens];
#pragma GCC unroll 2
    for (int i = 0; i < tiles; ++i) {
      if constexpr (ExpandedBlocks<type>::used) block[i].at = expanded[i].template next<tokens>();
      if constexpr (layout.whole()) {
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) of_block[i][t] = _mm512_setzero_ps();
      }
    }
    for (int g = 0; g < groups; ++g) {
#pragma GCC unroll 2
      for (int i = 0; i < tiles; ++i) {
        __m512* const total = layout.whole() ? of_block[i] : sums[i];
        if constexpr (!ExpandedBlocks<type>::used) fetch<type, tokens>(block[i].at + 64 * g * lines, lines);
        const uint8_t* planes = block[i].planes(g);
        const __m512i codes[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes),
                                       read_step<type, 2>(planes), read_step<type, 3>(planes),
                                       read_step<type, 4>(planes), read_step<type, 5>(planes),
                                       read_step<type, 6>(planes), read_step<type, 7>(planes)};
        __m512i scale[parts], minimum[parts];
#pragma GCC unroll 2
        for (int p = 0; p < parts; ++p) {
          scale[p] = halved<type>(block[i].scale(g * parts + p));
          if constexpr (layout.minimum && !layout.whole()) minimum[p] = block[i].minimum(g * parts + p);
        }
        const PairScales<type> pairs(scale);
        int64_t row = 0;
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t += lanes, row += lanes * strip.x_stride) {
          hide(row);
          add_group<type, lanes>(codes, scale, pairs, minimum, x, row, strip.x_stride, total + t);
        }
      }
      x.skip(1);
    }
#pragma GCC unroll 2
    for (int i = 0; i < tiles; ++i) {
      if constexpr (layout.whole()) {
        const __m512 block_scale = block[i].block_scale();
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) sums[i][t] = _mm512_fmadd_ps(of_block[i][t], block_scale, sums[i][t]);
      }
      if constexpr (layout.scales == ScaleKind::unsigned_byte) {
        const __m512i minima[2] = {load(block[i].byte_minima()), load(block[i].byte_minima() + 64)};
        const __m512 block_minimum = block[i].block_minimum();
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t)
          sums[i][t] = add_minima(sums[i][t], minima, block_minimum, group_sums + t * strip.x_stride);
      }
      block[i].at += layout.bytes();
    }
    if constexpr (layout.scales == ScaleKind::unsigned_byte) group_sums += sizeof(GroupSums);
  }
#pragma GCC unroll 2
  for (int i = 0; i < tiles; ++i)
    store_sums<tokens>(strip.y + i * strip.y_tile, strip.y_stride, i + 1 < tiles ? kTileRows : strip.rows, sums[i]);
}

template <Type type>
constexpr int kBlockWords = kFloatColumnPad / kWordColumns<type>;  // words of activations in a block of columns

struct PanelOfStrip {
  const Strip& strip;
  [[gnu::always_inline]] void fetch(int token, int tile) const {
    __builtin_prefetch(strip.y + token * strip.y_stride + tile * kTileRows, 1);
  }
  [[gnu::always_inline]] void ahead() const {}
  [[gnu::always_inline]] void take(int token, int tile, int rows, Vec sum) const {
    store_n(strip.y + token * strip.y_stride + tile * kTileRows, sum, rows);
  }
};

template <Type type, int tiles>
void panel_strip(const Strip& strip) {
  panel<type, tiles, kPanelTokens, 4>(strip.tile, strip.tile_bytes, strip.x, strip.x_stride,
                                      strip.blocks * kBlockWords<type>, strip.rows, PanelOfStrip{strip});
}

template <Type type, int tokens, int tiles>
void float_strip(const Strip& strip) {
  constexpr int vectors = 8;  // weights held in registers
  constexpr int lanes = lanes_of(tokens), bytes = vectors * kVectorBytes<type>;
  __m512 sums[tiles][tokens];
#pragma GCC unroll 2
  for (int i = 0; i < tiles; ++i)
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) sums[i][t] = _mm512_setzero_ps();
  const uint8_t *tile = strip.tile, *x = strip.x, *end = tile + strip.blocks * kBlockWords<type> * kVectorBytes<type>;
  for (; tile < end; tile += bytes, x += vectors * 4) {
#pragma GCC unroll 2
    for (int i = 0; i < tiles; ++i) {
      const uint8_t* const at = tile + i * strip.tile_bytes;
      __m512i weights[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) weights[v] = read_column<type>(at, v);
      fetch<type, tokens>(at, bytes / 64);
      int64_t row = 0;
#pragma GCC unroll 16
      for (int t = 0; t < tokens; t += lanes, row += lanes * strip.x_stride) {
        hide(row);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 4
          for (int l = 0; l < lanes; ++l)
            sums[i][t + l] =
                multiply_add<type>(sums[i][t + l], weights[v], broadcast32(x + row + l * strip.x_stride + 4 * v));
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < tiles; ++i)
    store_sums<tokens>(strip.y + i * strip.y_tile, strip.y_stride, i + 1 < tiles ? kTileRows : strip.rows, sums[i]);
}

template <Type type>
struct Product {
  static constexpr Type kType = type;
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;

  template <int tokens, int tiles = 1>
  static constexpr StripFunction of() {
    if constexpr (layout.columns > 0) return {tokens, tiles, block_strip<form_of(type), tokens, tiles>, tiles > 1};
    else return {tokens, tiles, float_strip<type, tokens, tiles>, tiles > 1};
  }

  static StripFunction strip(int64_t tokens, int64_t tiles) {
    static constexpr StripFunction sizes[9] = {{},      of<1>(), of<2>(), of<3>(), of<4>(),
                                               of<4>(), of<6>(), of<6>(), of<8>()},
                                   pairs[9] = {{},         of<1, 2>(), of<2, 2>(), of<3, 2>(), of<4, 2>(),
                                               of<4, 2>(), of<6, 2>(), of<6, 2>(), of<8, 2>()};
    if constexpr (layout.columns == 0) {
      if (tokens < kPanelTokens) return (weights_fetched && tiles > 1 ? pairs : sizes)[tokens];
      if (tiles == 2 || tiles == kPanelTiles + 1)
        return {kPanelTokens, 2, panel_strip<type, 2>};  // four are split into two and two
      return tiles < kPanelTiles ? StripFunction{kPanelTokens, 1, panel_strip<type, 1>}
                                 : StripFunction{kPanelTokens, kPanelTiles, panel_strip<type, kPanelTiles>};
    }
    if (weights_fetched && tiles > 1 && tokens < 12) return pairs[tokens < 8 ? tokens : 8];
    if (tokens >= 16) return of<16>();
    return tokens >= 12 ? of<12>() : sizes[tokens < 8 ? tokens : 8];
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
