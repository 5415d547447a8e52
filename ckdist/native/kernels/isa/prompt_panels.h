// Products of prompts with AMX: weights of any byte type are expanded to a panel of bfloat16 tiles in the L2 cache, once
// for all tokens, and multiplied as bfloat16. Scaling sums of 32 columns, as decode does, would cost more than the tiles.
// A weight is (block scale * group scale) * code - minimum in float32, rounded once to bfloat16. Sums run over the
// columns in order; those of each kPanelColumns columns are added to the ones before. Private to isa/.
#pragma once
#include "kernels/isa/linear_amx.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

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

// Expands a block to [column / 2][16 rows][2] of bfloat16.
template <Type type>
void expand_to_bf16(const Block<type>& block, uint8_t* out) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int steps = layout.unit() / 4;
  ExpandedBlock<type> expanded;
  expanded.read(block);
  const int8_t* codes = expanded.codes;
  for (int unit = 0; unit < layout.columns / layout.unit(); ++unit) {
    __m512 scale = expanded.scale(unit), minimum = _mm512_setzero_ps();
    if constexpr (layout.whole()) scale = _mm512_mul_ps(block.block_scale(), scale);
    if constexpr (ExpandedBlock<type>::kMinima > 0) {
      minimum = expanded.minimum(unit);
    } else if constexpr (layout.minimum) {
      const __m512i four = load(block.byte_minima() + 64 * (unit / 4));
      const __m512i bytes = _mm512_srl_epi32(four, _mm_cvtsi32_si128(8 * (unit % 4)));
      minimum = _mm512_mul_ps(block.block_minimum(), _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255))));
    }
#pragma GCC unroll 8
    for (int s = 0; s < steps; ++s, codes += 64, out += 128) {
      const __m512i words = _mm512_load_si512(codes);
      const auto value = [&](__m512 code) { return _mm512_fmsub_ps(code, scale, minimum); };
      _mm512_store_si512(out, pair_columns(value(signed_byte<0>(words)), value(signed_byte<1>(words))));
      _mm512_store_si512(out + 64, pair_columns(value(signed_byte<2>(words)), value(signed_byte<3>(words))));
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
  for (int64_t b = 0; b < count; ++b, out += columns * kTileRows * 2) {
    Block<form> block = {tile + (first + b) * bytes};
    if constexpr (stored.used) block.at = stored.template next<kStripTokens>();
    else fetch_lines(block.at + kNear, bytes / 64);
    expand_to_bf16<form>(block, out);
  }
}

template <Type type>
void multiply_prompt(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                     int64_t tokens, float* y, int64_t y_stride, uint8_t* panel) {
  constexpr int columns = layout_of(form_of(type)).columns;
  static_assert(kPanelColumns % columns == 0);
  for (int64_t tile = tile_begin; tile < tile_end; tile += kPanelTiles) {
    const int64_t tiles = tile_end - tile < kPanelTiles ? tile_end - tile : kPanelTiles;
    for (int64_t column = 0; column < matrix.cols; column += kPanelColumns) {
      const int64_t left = matrix.cols - column, cols = left < kPanelColumns ? left : kPanelColumns;
      const int64_t blocks = (cols + columns - 1) / columns, tile_bytes = blocks * columns * kTileRows * 2;
      for (int64_t t = 0; t < tiles; ++t)
        expand_tile<type>(matrix.tiles + (tile + t) * matrix.tile_bytes, column / columns, blocks,
                          panel + t * tile_bytes);
      const Matrix part = {Type::bf16, matrix.rows - tile * kTileRows, cols, tile_bytes, panel};
      const auto product = column > 0 ? multiply_bf16<true, PaddedRows> : multiply_bf16<false, PaddedRows>;
      product(part, 0, tiles, PaddedRows{x + column * 2, x_stride}, tokens, y + tile * kTileRows, y_stride);
    }
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
