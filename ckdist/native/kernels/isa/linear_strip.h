// How a product is tiled: strips of one tile or a few, over all columns, against a few tokens. The ISA's file says how
// a strip is computed.
//
// A Product<type> offers
//   kBlockColumns    the unit in which a strip counts columns
//   strip(n, tiles)  the strip for n remaining tokens and so many tiles: how many of each it takes (tokens by n alone),
//   and its function
// Columns are never split: bringing the sums of a few tokens back from y costs more than streaming a long tile from the
// L2 cache.
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
  const uint8_t* tile;  // the first
  int64_t tile_bytes;   // from one to the next
  int64_t blocks;
  const uint8_t* x;  // row of the first token
  int64_t x_stride;  // in bytes
  int64_t padded;    // columns of such a row
  float* y;          // (tokens, 16) of a tile through y_stride
  int64_t y_stride;
  int64_t y_tile;  // floats from a tile's y to the next one's
  int tokens;
  int rows;            // of the last tile that exist
  ExpandBlock expand;  // of types that are expanded; null where the tile's blocks are
  int block_bytes;     // of such a type's block, packed or expanded
};

// Where one token's activations of the current columns stand; the same parts of the next token are a stride away.
struct Columns {
  const uint8_t *codes, *scales, *sums32, *sums16;

  static Columns of(const uint8_t* row, int64_t padded) {
    return {row, row + ActivationRow::scales(padded), row + ActivationRow::sums32(padded),
            row + ActivationRow::sums16(padded)};
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
  bool apart = false;  // memory gives more when the tiles are of two places, each read from its beginning to its end
};

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A row's sums, shifted right by this, are minus the offset of the type's codes (minus one where there is none) times
// the sum.
template <Type type>
constexpr int sums_shift() {
  constexpr BlockLayout layout = layout_of(type);
  return log2_of(layout.group < kGroupColumns ? kSums16Factor : kSums32Factor) - log2_of(layout.offset);
}

constexpr int64_t kTileBlockBytes =
    384 << 10;  // of tiles that stay in the L2 cache while all tokens pass by, a few at a time in the L1
constexpr int64_t kRowsBytes = 512 << 10;  // of activations that stay there beside them
// Fetches a tile ahead of use. On Intel's CPUs from near ahead to the L1 cache, which gives a tenth more than the L2.
// On AMD's CPUs the hardware does that better than instructions for one or two tokens (by a fifth for whole bytes),
// unless scales stand per 16 columns. With more rows of activations beside the tile it loses track; then what is far
// ahead is brought to the L2 cache, as bringing it to the L1 cache holds up the loads (half the speed at eight tokens
// of whole bytes).
template <Type type, int tokens>
[[gnu::always_inline]] inline void fetch(const uint8_t* at, int lines) {
  constexpr int far = 16 << 10, nearer = 6 << 10;
  constexpr bool scaled_often = layout_of(type).group < kGroupColumns;
  if (weights_fetched) fetch_lines_near(at + kNear, lines);
  else if (tokens > 2) fetch_lines(at + far, lines);
  else if (scaled_often) fetch_lines_near(at + nearer, lines);
}

// Blocks that are packed as they are stored, expanded one after the other for the tokens of a strip.
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
  constexpr int packed_bytes = floats ? kFloat8Layout.bytes() : interleaved_of(Product::kType).bytes(),
                expanded_bytes = floats ? kExpandedFloat8 : layout_of(Product::kType).bytes();
  Strip strip;
  strip.blocks = (matrix.cols + Product::kBlockColumns - 1) / Product::kBlockColumns;
  strip.x_stride = x_stride;
  strip.padded = ActivationRow::padded(matrix.cols);
  strip.y_stride = y_stride;
  // Tiles that more than one strip reads are expanded once.
  const ExpandBlock expand = expand_of<Product::kType>();
  const bool once =
      expands && tokens > Product::strip(tokens, 1).tokens && strip.blocks * expanded_bytes <= kTileBlockBytes;
  alignas(64) uint8_t expanded[expands ? kTileBlockBytes : 64];
  strip.expand = once ? nullptr : expand;
  strip.block_bytes = once ? expanded_bytes : packed_bytes;
  const int64_t each = once ? strip.blocks * expanded_bytes : matrix.tile_bytes;  // bytes of a tile
  const int64_t fitting = each > 0 ? kTileBlockBytes / each : 1;
  const bool many = tokens > Product::strip(tokens, tile_end - tile_begin).tokens;  // strips for each tile
  const int64_t tile_block = !many ? tile_end - tile_begin : fitting > 1 ? fitting : 1;
  for (int64_t begin = tile_begin; begin < tile_end; begin += tile_block) {
    const int64_t end = begin + tile_block < tile_end ? begin + tile_block : tile_end;
    const uint8_t* first = matrix.tiles + begin * matrix.tile_bytes;
    if (once) {
      for (int64_t block = 0; block < (end - begin) * strip.blocks; ++block)
        expand(first + block * packed_bytes, expanded + block * expanded_bytes);
      first = expanded;
    }
    for (int64_t token = 0; token < tokens; token += strip.tokens) {
      const StripFunction widest = Product::strip(tokens - token, end - begin);
      strip.tokens = widest.tokens;
      strip.x = x + token * x_stride;
      // Tiles that are apart are one of the first half and one of the second.
      const int64_t step = widest.apart ? (end - begin) / 2 : 1;
      strip.tile_bytes = step * each;
      strip.y_tile = step * kTileRows;
      // The next tokens' rows come to the L2 cache meanwhile, a part with every tile, unless all stay there.
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
