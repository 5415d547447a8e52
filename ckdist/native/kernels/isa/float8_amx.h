// Products of 8-bit floats with AMX. Blocks are expanded once for all tokens to pairs of bfloat16, which are the layout
// of a tile of weights. Sums of a block's columns stay in tiles and are then scaled. Tiles handle every number of
// tokens, because their order of additions differs from that of vectors. Private to isa/.
#pragma once
#include "kernels/isa/linear_amx.h"
#include "kernels/isa/linear_float8.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kChunkBlocks = 32;  // blocks of two tiles, expanded: a part of the L2 cache

// Multiplies `blocks` expanded blocks of up to two tiles. Writes y if `begin`, else adds to it.
template <Type type>
void float8_tiles(const TileStrip& strip, const uint8_t* x, int64_t x_stride,
                  const uint8_t (*expanded)[kChunkBlocks * kExpandedFloat8<type>], int64_t blocks, bool begins) {
  constexpr int bytes = kExpandedFloat8<type>;
  constexpr int depth = kTileRowBytes / 2;  // columns of a product
  alignas(64) float sums[kSumsTiles * kTileSums], products[kSumsTiles * kTileSums];
  for (int s = 0; s < strip.strips(); ++s)
    for (int tile = 0; tile < strip.tile_count; ++tile)
      for (int t = 0; t < strip.strip_tokens(s); ++t) {
        const int left = strip.rows - tile * kTileRows;
        const __mmask16 rows = static_cast<__mmask16>(left < kTileRows ? (1u << left) - 1 : 0xffffu);
        const float* y = strip.y + (s * kStripTokens + t) * strip.y_stride + tile * kTileRows;
        _mm512_store_ps(sums + (2 * s + tile) * kTileSums + t * kTileRows,
                        begins ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(rows, y));
      }
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t *first = expanded[0] + b * bytes, *second = expanded[1] + b * bytes;
    zero_sums(strip.strips());
    for (int at = kExpandedScales; at < bytes; at += depth / 2 * kPairLine, x += kTileRowBytes)
      add_products<false>(strip, x, x_stride, first + at, second + at);
    store_tiles(strip, products);
    for (int tile = 0; tile < strip.tile_count; ++tile) {
      const __m512 scale = _mm512_loadu_ps(tile ? second : first);
      for (int s = 0; s < strip.strips(); ++s) {
        const int at = (2 * s + tile) * kTileSums;
        for (int t = at; t < at + strip.strip_tokens(s) * kTileRows; t += kTileRows)
          _mm512_store_ps(sums + t, _mm512_fmadd_ps(_mm512_load_ps(products + t), scale, _mm512_load_ps(sums + t)));
      }
    }
  }
  write_sums(strip, sums);
}

template <Type type>
void multiply_float8_in_tiles(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x,
                              int64_t x_stride, int64_t tokens, float* y, int64_t y_stride) {
  constexpr BlockLayout layout = layout_of(type);
  alignas(64) uint8_t expanded[2][kChunkBlocks * kExpandedFloat8<type>];
  const int64_t blocks = (matrix.cols + layout.columns - 1) / layout.columns;
  TileStrip strip{};
  strip.y_stride = y_stride;
  x += ActivationRow::offset(ActivationFormat::bf16, matrix.first_column);
  int configured = 0;
  for (int64_t tile = tile_begin; tile < tile_end; tile += 2) {
    const int64_t rows = matrix.rows - tile * kTileRows;
    strip.tile_count = tile_end - tile > 1 ? 2 : 1;
    strip.rows = static_cast<int>(rows < strip.tile_count * kTileRows ? rows : strip.tile_count * kTileRows);
    for (int64_t begin = 0; begin < blocks; begin += kChunkBlocks) {
      const int64_t count = blocks - begin < kChunkBlocks ? blocks - begin : kChunkBlocks;
      for (int i = 0; i < strip.tile_count; ++i)
        for (int64_t b = 0; b < count; ++b)
          expand_float8<type>(matrix.tiles + (tile + i) * matrix.tile_bytes + (begin + b) * layout.bytes(),
                              expanded[i] + b * kExpandedFloat8<type>);
      for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        strip.tokens = static_cast<int>(tokens - token < kTokensAtOnce ? tokens - token : kTokensAtOnce);
        if (strip.tokens != configured) configure(configured = strip.tokens, kTileRowBytes);
        strip.y = y + token * y_stride + tile * kTileRows;
        float8_tiles<type>(strip, x + token * x_stride + begin * layout.columns * kColumnBytes, x_stride, expanded,
                           count, begin == 0);
      }
    }
  }
  if (configured) tile_release();
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
