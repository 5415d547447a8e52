// How a product is cut: strips of one tile against a few tokens. The ISA's file says how a strip is computed.
//
// A Product<type> offers
//   kBlockColumns, kBlockBytes    the unit in which a strip counts columns
//   strip(n)                      the strip for n remaining tokens: how many of them it takes, and its function
// Sums leave a strip as float32 and come back unchanged, so cutting the columns does not change a bit of the result.
#pragma once
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

struct Strip {
  const uint8_t* tile;  // its first block in this strip
  int64_t blocks;
  int64_t ahead;        // from the bytes in use to those worth prefetching
  const uint8_t* x;     // row of the first token
  int64_t x_stride;     // in bytes
  int tokens;
  int64_t padded;       // columns of a row
  int64_t column;       // where the first block stands
  float* y;             // (tokens, 16) through y_stride
  int64_t y_stride;
  int rows;             // of the tile that exist
  bool resume;          // add to what y holds
};

struct StripFunction {
  int tokens;
  void (*run)(const Strip&);
};

constexpr int64_t kTokenBlock = 128;   // tokens whose activations stay in the L2 cache while all tiles pass by
constexpr int64_t kStripBytes = 8192;  // of a tile, that stay in the L1 cache beside the same columns of a few tokens
constexpr int64_t kFewTokens = 16;     // up to this many, tiles are streamed whole, as they lie in memory
constexpr int64_t kAhead = 2048;       // of a stream; where columns are cut, the same strip of the next tile is fetched ahead

template <class Product>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y,
              int64_t y_stride) {
  const int64_t blocks = (matrix.cols + Product::kBlockColumns - 1) / Product::kBlockColumns;
  const int64_t step = tokens <= kFewTokens ? blocks : kStripBytes / Product::kBlockBytes;
  Strip strip;
  strip.x_stride = x_stride;
  strip.padded = ActivationRow::padded(matrix.cols);
  strip.y_stride = y_stride;
  strip.ahead = step < blocks ? matrix.tile_bytes : kAhead;
  for (int64_t token_block = 0; token_block < tokens; token_block += kTokenBlock) {
    const int64_t token_end = token_block + kTokenBlock < tokens ? token_block + kTokenBlock : tokens;
    int64_t block = 0;
    do {
      strip.blocks = blocks - block < step ? blocks - block : step;
      strip.column = block * Product::kBlockColumns;
      strip.resume = block > 0;
      for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
        const int64_t row = tile * kTileRows;
        strip.tile = matrix.tiles + tile * matrix.tile_bytes + block * Product::kBlockBytes;
        strip.rows = static_cast<int>(matrix.rows - row < kTileRows ? matrix.rows - row : kTileRows);
        for (int64_t token = token_block; token < token_end;) {
          const StripFunction function = Product::strip(token_end - token);
          strip.tokens = function.tokens;
          strip.x = x + token * x_stride;
          strip.y = y + token * y_stride + row;
          function.run(strip);
          token += function.tokens;
        }
      }
      block += step;
    } while (block < blocks);
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
