// Tiling of a product: strips of one or a few tiles, over all columns, by a few tokens. The ISA's file computes a
// strip. A Product<type> has
//   kBlockColumns    the unit in which a strip counts columns
//   strip(n, tiles)  the strip for n remaining tokens and `tiles` tiles: the numbers of tokens (by n alone) and tiles
//   that it takes, and its function
// Columns are never split: loading the sums of a few tokens from y costs more than streaming a long tile from the L2
// cache.
#pragma once
#include "kernels/formats.h"
#include "kernels/isa/expand.h"
#include "kernels/isa/float8.h"
#include "kernels/layout.h"
#include "kernels/prefetch.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#define CKDIST_QUOTE(name) #name
#define CKDIST_QUOTED(macro) CKDIST_QUOTE(macro)
constexpr LevelFormats kFormats =
    *level_formats(CKDIST_QUOTED(CKDIST_ISA));  // fails to compile if it is not in the table
#undef CKDIST_QUOTED
#undef CKDIST_QUOTE

struct Strip {
  const uint8_t* tile;  // the first tile
  int64_t tile_bytes;   // from one tile to the next
  int64_t blocks;
  const uint8_t* x;  // row of the first token
  int64_t x_stride;  // in bytes
  int64_t padded;    // columns of such a row
  int64_t column;    // the first column, in a q8 row
  float* y;          // (tokens, 16) of a tile through y_stride
  int64_t y_stride;
  int64_t y_tile;  // floats from a tile's y to the next tile's
  int tokens;
  int rows;  // number of existing rows of the last tile
  // For types that are expanded; null if the tile's blocks are already expanded.
  ExpandBlock expand;
  int block_bytes;  // packed or expanded
};

// The position of one token's activations of the current columns. The next token's are `stride` bytes later.
struct Columns {
  const uint8_t *codes, *scales, *sums32, *sums16;

  // `column`: a multiple of kColumnPad.
  static Columns of(const uint8_t* row, int64_t padded, int64_t column) {
    const int64_t group = column / kGroupColumns;
    return {row + column, row + ActivationRow::scales(padded) + group * int64_t{sizeof(float)},
            row + ActivationRow::sums32(padded) + group * int64_t{sizeof(int32_t)},
            row + ActivationRow::sums16(padded) + 2 * group * int64_t{sizeof(int32_t)}};
  }
  static const uint8_t* group_sums(const uint8_t* row, int64_t padded, int64_t column) {
    return row + ActivationRow::group_sums(padded) + column / kColumnPad * int64_t{sizeof(GroupSums)};
  }
  void skip(int groups) {
    codes += groups * kGroupColumns;
    scales += groups * sizeof(float);
    sums32 += groups * sizeof(int32_t);
    sums16 += 2 * groups * sizeof(int32_t);
  }
};

struct StripFunction {
  int tokens, tiles;
  void (*run)(const Strip&);
  // Memory is faster if the tiles are in two places, each read from beginning to end.
  bool apart = false;
};

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A row's sums, shifted right by this number, are minus the offset of the type's codes (minus 1 if there is none) times
// the sum.
template <Type type>
constexpr int sums_shift() {
  constexpr BlockLayout layout = layout_of(type);
  return log2_of(layout.group < kGroupColumns ? kSums16Factor : kSums32Factor) - log2_of(layout.offset);
}

// Bytes of tiles that stay in the L2 cache for all tokens; a few tokens at a time are in the L1 cache.
constexpr int64_t kTileBlockBytes = 384 << 10;
constexpr int64_t kRowsBytes = 512 << 10;  // bytes of activations that stay in the L2 cache with them
// Prefetches a tile. On Intel's CPUs: from near ahead to the L1 cache, which is a tenth faster than to the L2 cache. On
// Zen 4 the hardware is better than instructions for one or two tokens (by a fifth for 8-bit codes), except if there is
// a scale per 16 columns. On Zen 5 it is as good for 8-bit codes, but halves the speed of blocks of other sizes. With
// more rows of activations the hardware prefetcher fails. Then memory far ahead is prefetched to the L2 cache, because
// prefetching to the L1 cache delays loads (half the speed at eight tokens of 8-bit codes).
template <Type type, int tokens>
[[gnu::always_inline]] inline void fetch(const uint8_t* at, int lines) {
  constexpr int far = 16 << 10, nearer = 6 << 10;
  constexpr BlockLayout layout = layout_of(type);
  constexpr bool scaled_often = layout.group < kGroupColumns;
  constexpr bool small = layout.low_bits > 0 && layout.low_bits + layout.high_bits < 8;
  if (weights_fetched) fetch_lines_near(at + kNear, lines);
  else if (tokens > 2) fetch_lines(at + far, lines);
  else if (scaled_often || (small && codes_fetched)) fetch_lines_near(at + nearer, lines);
}

// Expands blocks that are packed as they are stored, one after the other, for the tokens of a strip.
template <Type type>
struct ExpandedBlocks {
  static constexpr bool used = layout_of(type).scales == ScaleKind::expanded;
  const uint8_t* at;
  ExpandBlock expand;
  int bytes;
  alignas(64) uint8_t block[used ? layout_of(type).bytes() : 64];

  void begin(const uint8_t* tile, ExpandBlock expand_block, int block_bytes) {
    at = tile, expand = expand_block, bytes = block_bytes;
  }

  template <int tokens>
  const uint8_t* next() {
    const uint8_t* const packed = at;
    at += bytes;
    if (!expand) return packed;
    fetch<type, tokens>(packed, bytes / 64);
    expand(packed, block);
    return block;
  }
};

template <class Product>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
              int64_t tokens, float* y, int64_t y_stride) {
  constexpr bool floats = is_float8(Product::kType), expands = is_interleaved(Product::kType) || floats;
  constexpr int packed_bytes = floats ? layout_of(Product::kType).bytes() : interleaved_of(Product::kType).bytes(),
                expanded_bytes = floats ? kExpandedFloat8<Product::kType> : layout_of(Product::kType).bytes();
  Strip strip;
  strip.blocks = (matrix.cols + Product::kBlockColumns - 1) / Product::kBlockColumns;
  strip.x_stride = x_stride;
  strip.padded = matrix.padded();
  strip.column = matrix.first_column;
  strip.y_stride = y_stride;
  // Tiles that several strips read are expanded once.
  const ExpandBlock expand = expand_of<Product::kType>();
  const bool once =
      expands && tokens > Product::strip(tokens, 1).tokens && strip.blocks * expanded_bytes <= kTileBlockBytes;
  alignas(64) uint8_t expanded[expands ? kTileBlockBytes : 64];
  strip.expand = once ? nullptr : expand;
  strip.block_bytes = once ? expanded_bytes : packed_bytes;
  const int64_t each = once ? strip.blocks * expanded_bytes : matrix.tile_bytes;  // bytes of a tile
  const int64_t fitting = each > 0 ? kTileBlockBytes / each : 1;
  const bool many = tokens > Product::strip(tokens, tile_end - tile_begin).tokens;  // several strips for each tile
  const int64_t tile_block = !many ? tile_end - tile_begin : fitting > 1 ? fitting : 1;
  for (int64_t begin = tile_begin; begin < tile_end; begin += tile_block) {
    const int64_t end = begin + tile_block < tile_end ? begin + tile_block : tile_end;
    const uint8_t* first = matrix.tiles + begin * matrix.tile_bytes;
    if (once) {
      for (int64_t tile = 0; tile < end - begin; ++tile)
        for (int64_t block = 0; block < strip.blocks; ++block)
          expand(first + tile * matrix.tile_bytes + block * packed_bytes,
                 expanded + (tile * strip.blocks + block) * expanded_bytes);
      first = expanded;
    }
    for (int64_t token = 0; token < tokens; token += strip.tokens) {
      const StripFunction widest = Product::strip(tokens - token, end - begin);
      strip.tokens = widest.tokens;
      strip.x = x + token * x_stride + ActivationRow::offset(activation_format(kFormats, Product::kType), strip.column);
      // If tiles are apart, one is from the first half and one from the second.
      const int64_t step = widest.apart ? (end - begin) / 2 : 1;
      strip.tile_bytes = step * each;
      strip.y_tile = step * kTileRows;
      // Prefetches the next tokens' rows to the L2 cache, a part with every tile, unless all rows stay there.
      const uint8_t* next = strip.x + strip.tokens * x_stride;
      const int64_t coming =
          tokens - token - strip.tokens < strip.tokens ? tokens - token - strip.tokens : strip.tokens;
      const int64_t lines =
          tokens * x_stride <= kRowsBytes ? 0 : (coming * x_stride / 64 + end - begin - 1) / (end - begin);
      for (int64_t done = begin, tiles; done < end; done += tiles) {
        const StripFunction function = Product::strip(tokens - token, end - done);
        tiles = function.tiles;
        for (int64_t line = 0; line < lines * tiles; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        const int64_t tile = function.apart ? begin + (done - begin) / 2 : done;
        const int64_t last = (tile + (tiles - 1) * step) * kTileRows;
        strip.tile = first + (tile - begin) * each;
        strip.rows = static_cast<int>(matrix.rows - last < kTileRows ? matrix.rows - last : kTileRows);
        strip.y = y + token * y_stride + tile * kTileRows;
        for (int t = 0; t < strip.tokens; ++t) __builtin_prefetch(strip.y + t * y_stride, 1);
        function.run(strip);
      }
    }
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
