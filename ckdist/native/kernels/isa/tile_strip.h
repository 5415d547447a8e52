// One step of products with AMX: up to 32 tokens by up to 32 rows of weights, as two by two tiles of sums over two
// tiles of activations and two of weights. Private to isa/.
#pragma once
#include "kernels/isa/linear_avx512.h"
#include "kernels/isa/tile.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kStripTokens = kTileMostRows, kTokensAtOnce = 2 * kStripTokens;
constexpr int kSumsTiles = 4;                        // tile of sums: 2 * strip of tokens + tile of weights
constexpr int kActivationTile = 4, kWeightTile = 6;  // first of two each
constexpr int kTileSums = kStripTokens * kTileRows;

// Numbers of tokens and tiles of weights, and the destination of their sums.
struct TileStrip {
  int tokens, tile_count;
  int rows;  // existing rows of the tiles
  float* y;  // (tokens, rows) through y_stride
  int64_t y_stride;

  int strips() const { return tokens > kStripTokens ? 2 : 1; }
  bool whole() const { return rows == tile_count * kTileRows; }
  int strip_tokens(int strip) const {
    return strip ? tokens - kStripTokens : tokens < kStripTokens ? tokens : kStripTokens;
  }
};

// `depth`: bytes of activations in one product, which is 4 * rows of weights.
inline void configure(int tokens, int depth) {
  TileShapes shapes;
  for (int strip = 0; strip < 2; ++strip) {
    const int left = tokens - strip * kStripTokens;
    const int rows = left < 0 ? 0 : left < kStripTokens ? left : kStripTokens;
    shapes.set(2 * strip, rows, kTileRowBytes);
    shapes.set(2 * strip + 1, rows, kTileRowBytes);
    shapes.set(kActivationTile + strip, rows, depth);
    shapes.set(kWeightTile + strip, depth / 4, kTileRowBytes);
  }
  tile_configure(shapes);
}

inline void zero_sums(int strips) {
  tile_zero<0>();
  tile_zero<1>();
  if (strips > 1) {
    tile_zero<2>();
    tile_zero<3>();
  }
}

template <bool bytes, int sum, int a, int b>
inline void tile_dot() {
  if constexpr (bytes) tile_dot_bytes<sum, a, b>();
  else tile_dot_bf16<sum, a, b>();
}

// Adds the products of strip `s`, whose tokens are in tile `a`, and one or two tiles.
template <bool bytes, int s, int a>
inline void add_strip(bool pair) {
  tile_dot<bytes, 2 * s, a, kWeightTile>();
  if (pair) tile_dot<bytes, 2 * s + 1, a, kWeightTile + 1>();
}

// x: the activations of the first token; the next token's are x_stride bytes later, those of the next strip
// strip_bytes. A second strip with 16 tokens takes the first one's tile: see add_steps().
template <bool bytes>
inline void add_products(const TileStrip& strip, const uint8_t* x, int64_t x_stride, const void* first,
                         const void* second, int64_t strip_bytes) {
  constexpr int a = kActivationTile, b = kWeightTile;
  const bool pair = strip.tile_count > 1;
  tile_load<a>(x, x_stride);
  tile_load<b>(first, kTileRowBytes);
  if (pair) tile_load<b + 1>(second, kTileRowBytes);
  add_strip<bytes, 0, a>(pair);
  if (strip.tokens == kTokensAtOnce) {
    tile_load<a>(x + strip_bytes, x_stride);
    add_strip<bytes, 1, a>(pair);
  } else if (strip.strips() > 1) {
    tile_load<a + 1>(x + strip_bytes, x_stride);
    add_strip<bytes, 1, a + 1>(pair);
  }
}

// The same for tokens that are all x_stride bytes apart.
template <bool bytes>
inline void add_products(const TileStrip& strip, const uint8_t* x, int64_t x_stride, const void* first,
                         const void* second) {
  add_products<bytes>(strip, x, x_stride, first, second, kStripTokens * x_stride);
}

// Loads the sums from [tile of sums][token][row] of 32 bits.
inline void load_tiles(const TileStrip& strip, const void* from) {
  const uint8_t* in = static_cast<const uint8_t*>(from);
  constexpr int bytes = 4 * kTileSums;
  tile_load<0>(in, kTileRowBytes);
  if (strip.tile_count > 1) tile_load<1>(in + bytes, kTileRowBytes);
  if (strip.strips() > 1) {
    tile_load<2>(in + 2 * bytes, kTileRowBytes);
    if (strip.tile_count > 1) tile_load<3>(in + 3 * bytes, kTileRowBytes);
  }
}

// Stores the sums to [tile of sums][token][row] of 32 bits.
inline void store_tiles(const TileStrip& strip, void* to) {
  uint8_t* out = static_cast<uint8_t*>(to);
  constexpr int bytes = 4 * kTileSums;
  tile_store<0>(out, kTileRowBytes);
  if (strip.tile_count > 1) tile_store<1>(out + bytes, kTileRowBytes);
  if (strip.strips() > 1) {
    tile_store<2>(out + 2 * bytes, kTileRowBytes);
    if (strip.tile_count > 1) tile_store<3>(out + 3 * bytes, kTileRowBytes);
  }
}

// Stores the sums to y, if the tiles are whole.
inline void store_sums(const TileStrip& strip) {
  const int64_t stride = 4 * strip.y_stride;
  tile_store<0>(strip.y, stride);
  if (strip.tile_count > 1) tile_store<1>(strip.y + kTileRows, stride);
  if (strip.strips() > 1) {
    float* const y = strip.y + kStripTokens * strip.y_stride;
    tile_store<2>(y, stride);
    if (strip.tile_count > 1) tile_store<3>(y + kTileRows, stride);
  }
}

// Copies the sums from memory to y, or adds them.
template <bool add = false>
inline void write_sums(const TileStrip& strip, const float* sums) {
  for (int s = 0; s < strip.strips(); ++s)
    for (int tile = 0; tile < strip.tile_count; ++tile) {
      const int left = strip.rows - tile * kTileRows;
      const __mmask16 rows = static_cast<__mmask16>(left < kTileRows ? (1u << left) - 1 : 0xffffu);
      const float* from = sums + (2 * s + tile) * kTileSums;
      float* y = strip.y + s * kStripTokens * strip.y_stride + tile * kTileRows;
      for (int t = 0; t < strip.strip_tokens(s); ++t, from += kTileRows, y += strip.y_stride) {
        __m512 sum = _mm512_load_ps(from);
        if constexpr (add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, y), sum);
        _mm512_mask_storeu_ps(y, rows, sum);
      }
    }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
