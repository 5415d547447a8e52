// How a product is cut: strips of one tile, over all its columns, against a few tokens. The ISA's file says how a strip is computed.
//
// A Product<type> offers
//   kBlockColumns    the unit in which a strip counts columns
//   strip(n)         the strip for n remaining tokens: how many of them it takes, and its function
//   kExpandFrom      tokens from which tiles are expanded first, so that unpacking is paid once and not per strip; 0 for never
//   expand           writes one tile, expanded
//   expanded_strip   strip(n) on expanded tiles
// Columns are never cut: bringing the sums of a few tokens back from y costs more than streaming a long tile from the L2 cache.
#pragma once
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

struct Strip {
  const uint8_t* tile;
  int64_t blocks;
  const uint8_t* x;   // row of the first token
  int64_t x_stride;   // in bytes
  int64_t padded;     // columns of such a row
  float* y;           // (tokens, 16) through y_stride
  int64_t y_stride;
  int tokens;
  int rows;           // of the tile that exist
};

struct StripFunction {
  int tokens;
  void (*run)(const Strip&);
};

// A block of a tile as products read it best, whatever the type: for every 32 columns the codes of 8 bits in eight vectors and
// the vectors of scales (and minima where they are no bytes), at the end the block's own scales and the bytes of its minima.
template <Type type>
struct Expanded {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kVector = 64;
  static constexpr int kParts = kGroupColumns / layout.group;  // scales within 32 columns
  static constexpr bool kByteMinima = layout.scales == ScaleKind::unsigned_byte;
  static constexpr int kScales = kGroupColumns * kTileRows;
  static constexpr int kMinima = kScales + kVector * kParts;
  static constexpr int kGroupBytes = kMinima + (layout.minimum && !kByteMinima ? kVector * kParts : 0);
  static constexpr int kBlockScale = layout.columns / kGroupColumns * kGroupBytes;
  static constexpr int kBlockMinimum = kBlockScale + (layout.whole() ? kVector : 0);
  static constexpr int kGroupMinima = kBlockMinimum + (kByteMinima ? kVector : 0);
  static constexpr int kBytes = kGroupMinima + (kByteMinima ? layout.columns / kGroupColumns * kTileRows : 0);
};

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A row's sums, shifted right by this, are minus the offset of the type's codes (minus one where there is none) times the sum.
template <Type type>
constexpr int sums_shift() {
  constexpr BlockLayout layout = layout_of(type);
  return log2_of(layout.group == kGroupColumns ? kSums32Factor : kSums16Factor) - log2_of(layout.offset);
}

constexpr int64_t kTileBlockBytes = 384 << 10;  // of tiles that stay in the L2 cache while all tokens pass by, a few at a time in the L1
// The hardware fetches tiles ahead better than instructions do (by a fifth for whole bytes), but for types with scales per 16
// columns, where the distance below is best.
template <Type type>
constexpr bool prefetched() {
  return layout_of(type).group < kGroupColumns;
}
constexpr int kAhead = 6144;  // in bytes

template <class Product>
int64_t blocks_of(int64_t cols) {
  return (cols + Product::kBlockColumns - 1) / Product::kBlockColumns;
}

template <class Product>
int64_t scratch_bytes(int64_t cols) {
  if (Product::kExpandFrom == 0) return 64;
  const int64_t tile = blocks_of<Product>(cols) * Product::kExpandedBytes;
  return tile > kTileBlockBytes ? tile : kTileBlockBytes;
}

template <class Product>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y,
              int64_t y_stride, uint8_t* scratch) {
  Strip strip;
  strip.blocks = blocks_of<Product>(matrix.cols);
  strip.x_stride = x_stride;
  strip.padded = ActivationRow::padded(matrix.cols);
  strip.y_stride = y_stride;
  const bool expanded = Product::kExpandFrom > 0 && tokens >= Product::kExpandFrom;
  const int64_t tile_bytes = expanded ? strip.blocks * Product::kExpandedBytes : matrix.tile_bytes;
  const int64_t fitting = tile_bytes > 0 ? kTileBlockBytes / tile_bytes : 1;
  const int64_t tile_block = fitting > 1 ? fitting : 1;
  for (int64_t begin = tile_begin; begin < tile_end; begin += tile_block) {
    const int64_t end = begin + tile_block < tile_end ? begin + tile_block : tile_end;
    const uint8_t* tiles = matrix.tiles + begin * matrix.tile_bytes;
    if constexpr (Product::kExpandFrom > 0) {
      if (expanded) {
        for (int64_t tile = 0; tile < end - begin; ++tile) Product::expand(tiles + tile * matrix.tile_bytes, strip.blocks, scratch + tile * tile_bytes);
        tiles = scratch;
      }
    }
    for (int64_t token = 0; token < tokens; token += strip.tokens) {
      const StripFunction function = expanded ? Product::expanded_strip(tokens - token) : Product::strip(tokens - token);
      strip.tokens = function.tokens;
      strip.x = x + token * x_stride;
      // The next tokens' rows come to the L2 cache meanwhile, a part with every tile.
      const uint8_t* next = strip.x + strip.tokens * x_stride;
      const int64_t coming = tokens - token - strip.tokens < strip.tokens ? tokens - token - strip.tokens : strip.tokens;
      const int64_t lines = (coming * x_stride / 64 + end - begin - 1) / (end - begin);
      for (int64_t tile = begin; tile < end; ++tile) {
        for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        const int64_t row = tile * kTileRows;
        strip.tile = tiles + (tile - begin) * tile_bytes;
        strip.rows = static_cast<int>(matrix.rows - row < kTileRows ? matrix.rows - row : kTileRows);
        strip.y = y + token * y_stride + row;
        for (int t = 0; t < strip.tokens; ++t) __builtin_prefetch(strip.y + t * y_stride, 1);
        function.run(strip);
      }
    }
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
