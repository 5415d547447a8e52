// Adds the product of LoRA's matrix B: rows of x A^T, in float32, times tiles of B.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

struct LowRankSum {
  static constexpr int64_t kTokens = 16, kTiles = 8;  // tokens and tiles at a time
  static constexpr int64_t kSingleRows = 2;           // products of at most this many rows are computed row by row

  float* sums;  // (kTokens, kTiles * kTileRows)

  static LowRankSum carve(Carver& c) { return {c.floats(kTokens * kTiles * kTileRows)}; }

  // y += x * B^T for tiles of B, only the first `columns` columns. y[row][0] belongs to the first row of the first
  // tile.
  void add(const Kernels& kernels, const Matrix& b, Range tiles, int64_t columns, const float* x, int64_t x_stride,
           int64_t rows, float* y, int64_t stride) const {
    if (rows <= kSingleRows) {
      for (int64_t row = 0; row < rows; row++)
        kernels.low_rank.add(b.type == Type::f16, b.tiles + tiles.begin * b.tile_bytes, b.tile_bytes, columns, b.cols,
                             x + row * x_stride, y + row * stride);
      return;
    }
    for (int64_t tile = tiles.begin; tile < tiles.end; tile += kTiles) {
      const int64_t last = std::min(tile + kTiles, tiles.end), from = (tile - tiles.begin) * kTileRows,
                    width = std::min((last - tile) * kTileRows, columns - from);
      const Matrix part{b.type, (last - tile) * kTileRows, b.cols, b.tile_bytes, b.tiles + tile * b.tile_bytes};
      for (int64_t row = 0; row < rows; row += kTokens) {
        const int64_t n = std::min(kTokens, rows - row);
        kernels.linear[int(b.type)].multiply(part, 0, last - tile, reinterpret_cast<const uint8_t*>(x + row * x_stride),
                                             x_stride * 4, n, sums, kTiles * kTileRows);
        for (int64_t t = 0; t < n; t++)
          kernels.elementwise.add(sums + t * kTiles * kTileRows, width, y + (row + t) * stride + from);
      }
    }
  }
};

}  // namespace ckdist
