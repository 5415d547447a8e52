// Products of prompts with AMX: weights of any byte type are expanded to a panel of bfloat16 tiles in the L2 cache,
// once for all tokens, and multiplied as bfloat16. Scaling sums of 32 columns, as decode does, would cost more than the
// tiles. A weight is (block scale * group scale) * code - minimum in float32, rounded once to bfloat16. Sums stay in
// tile registers over up to kPromptColumns columns, and run over the columns in order. Private to isa/.
//
// A panel has pairs of tiles: [step of 32 columns][2 tiles][16 pairs of columns][16 rows][2].
#pragma once
#include "kernels/isa/linear_amx.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Bfloat16 of sixteen rows' `first` and `second` columns, as [row][2].
inline __m512i pair_columns(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Byte `i` of each word as a float.
template <int i>
inline __m512 signed_byte(__m512i words) {
  if constexpr (i < 3) words = _mm512_slli_epi32(words, 24 - 8 * i);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 24));
}

constexpr int kPairBytes = 2 * kWeightBytes;  // of a step of two tiles
constexpr int kStepsAhead = 2;                // steps whose weights are on their way to the L1 cache

// Expands a block to bfloat16. `out`: the tile's part of the first step; the next step's is kPairBytes later.
template <Type type>
void expand_to_bf16(const Block<type>& block, uint8_t* out) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int words = layout.unit() / 4, words_of_step = kStepBytes / 8;  // words of four columns
  ExpandedBlock<type> expanded;
  expanded.read(block);
  for (int unit = 0; unit < layout.columns / layout.unit(); ++unit) {
    __m512 scale = expanded.scale(unit), minimum = _mm512_setzero_ps();
    if constexpr (layout.whole()) scale = _mm512_mul_ps(block.block_scale(), scale);
    if constexpr (ExpandedBlock<type>::kMinima > 0) {
      minimum = expanded.minimum(unit);
    } else if constexpr (layout.minimum) {
      const __m512i four = load(block.byte_minima() + 64 * (unit / 4));
      const __m512i bytes = _mm512_srl_epi32(four, _mm_cvtsi32_si128(8 * (unit % 4)));
      minimum =
          _mm512_mul_ps(block.block_minimum(), _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255))));
    }
    const auto value = [&](__m512 code) { return _mm512_fmsub_ps(code, scale, minimum); };
#pragma GCC unroll 8
    for (int i = 0; i < words; ++i) {
      const int word = unit * words + i;
      const __m512i codes = _mm512_load_si512(expanded.codes + 64 * word);
      uint8_t* const to = out + word / words_of_step * kPairBytes + word % words_of_step * 128;
      _mm512_store_si512(to, pair_columns(value(signed_byte<0>(codes)), value(signed_byte<1>(codes))));
      _mm512_store_si512(to + 64, pair_columns(value(signed_byte<2>(codes)), value(signed_byte<3>(codes))));
    }
  }
}

// Expands blocks [first, first + count) of a tile.
template <Type type>
void expand_tile(const uint8_t* tile, int64_t first, int64_t count, uint8_t* out) {
  constexpr Type form = form_of(type);
  constexpr int columns = layout_of(form).columns;
  ExpandedBlocks<form> stored;
  constexpr int bytes = stored.used ? interleaved_of(type).bytes() : layout_of(form).bytes();
  stored.begin(tile + first * bytes, expand_of<type>(), bytes);
  for (int64_t b = 0; b < count; ++b, out += columns / (kStepBytes / 2) * kPairBytes) {
    Block<form> block = {tile + (first + b) * bytes};
    if constexpr (stored.used) block.at = stored.template next<kStripTokens>();
    else fetch_lines(block.at + kNear, bytes / 64);
    expand_to_bf16<form>(block, out);
  }
}

// Loads the sums from y: the opposite of store_sums, and of write_sums by way of `room`.
inline void load_sums(const TileStrip& strip, float* room) {
  if (strip.whole()) {
    const int64_t stride = 4 * strip.y_stride;
    tile_load<0>(strip.y, stride);
    if (strip.tile_count > 1) tile_load<1>(strip.y + kTileRows, stride);
    if (strip.strips() > 1) {
      const float* const y = strip.y + kStripTokens * strip.y_stride;
      tile_load<2>(y, stride);
      if (strip.tile_count > 1) tile_load<3>(y + kTileRows, stride);
    }
    return;
  }
  for (int s = 0; s < strip.strips(); ++s)
    for (int tile = 0; tile < strip.tile_count; ++tile) {
      const int left = strip.rows - tile * kTileRows;
      const __mmask16 rows = static_cast<__mmask16>(left < kTileRows ? (1u << left) - 1 : 0xffffu);
      const float* y = strip.y + s * kStripTokens * strip.y_stride + tile * kTileRows;
      for (int t = 0; t < strip.strip_tokens(s); ++t, y += strip.y_stride)
        _mm512_store_ps(room + (2 * s + tile) * kTileSums + t * kTileRows, _mm512_maskz_loadu_ps(rows, y));
    }
  load_tiles(strip, room);
}

// Multiplies a pair of tiles of a panel by a strip of tokens. `adds`: to the sums in y.
inline void multiply_pair(const TileStrip& strip, const uint8_t* pair, int64_t steps, const uint8_t* x,
                          int64_t x_stride, bool adds) {
  alignas(64) float room[kSumsTiles * kTileSums];
  if (adds) load_sums(strip, room);
  else zero_sums(strip.strips());
  for (int64_t s = 0; s < steps; ++s, pair += kPairBytes, x += kStepBytes) {
    fetch_lines_near(pair + kStepsAhead * kPairBytes, kPairBytes / 64);
    add_products<false>(strip, x, x_stride, pair, pair + kWeightBytes);
  }
  if (strip.whole()) return store_sums(strip);
  store_tiles(strip, room);
  write_sums(strip, room);
}

template <Type type>
void multiply_prompt(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                     int64_t tokens, float* y, int64_t y_stride, uint8_t* panel) {
  constexpr int columns = layout_of(form_of(type)).columns;
  static_assert(kPromptColumns % columns == 0 && kPromptTiles % 2 == 0);
  TileStrip strip{};
  strip.y_stride = y_stride;
  int configured = 0;
  for (int64_t group = tile_begin; group < tile_end; group += kPromptTiles) {
    const int64_t tiles = least(kPromptTiles, tile_end - group);
    for (int64_t column = 0; column < matrix.cols; column += kPromptColumns) {
      const int64_t blocks = (least(kPromptColumns, matrix.cols - column) + columns - 1) / columns;
      const int64_t steps = blocks * columns * 2 / kStepBytes;
      for (int64_t t = 0; t < tiles; ++t)
        expand_tile<type>(matrix.tiles + (group + t) * matrix.tile_bytes, column / columns, blocks,
                          panel + t / 2 * steps * kPairBytes + t % 2 * kWeightBytes);
      for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        strip.tokens = static_cast<int>(least(kTokensAtOnce, tokens - token));
        if (strip.tokens != configured) configure(configured = strip.tokens, kTileRowBytes);
        for (int64_t t = 0; t < tiles; t += 2) {
          const int64_t row = (group + t) * kTileRows;
          strip.tile_count = tiles - t > 1 ? 2 : 1;
          strip.rows = static_cast<int>(least(strip.tile_count * kTileRows, matrix.rows - row));
          strip.y = y + token * y_stride + row;
          multiply_pair(strip, panel + t / 2 * steps * kPairBytes, steps, x + token * x_stride + column * 2, x_stride,
                        column > 0);
        }
      }
    }
  }
  if (configured) tile_release();
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
