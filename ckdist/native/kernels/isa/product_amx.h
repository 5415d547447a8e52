// Training's products of bfloat16 with AMX: the tiles of inference for each block of columns; the blocks are added.
// Private to isa/.
#pragma once
#include "kernels/isa/bf16_tiles.h"
#include "kernels/isa/product_output.h"
#include "kernels/isa/training_tiles.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t kBlockColumns = 2048;

void multiply_columns(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                      int64_t tokens, float* y, int64_t y_stride, bool add) {
  for (int64_t column = 0; column < matrix.cols; column += kBlockColumns) {
    Matrix part = matrix;
    part.cols = least(kBlockColumns, matrix.cols - column), part.tiles += column * 2 * kTileRows;
    const ActivationRows rows{x + column * 2, x_stride, (part.cols + 15) / 16};
    const auto product = add || column > 0 ? multiply_bf16<true, ActivationRows> : multiply_bf16<false, ActivationRows>;
    product(part, tile_begin, tile_end, rows, tokens, y, y_stride);
  }
}

void produce_columns(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums,
                     const ProductOutput& out) {
  const int64_t tiles = matrix.tile_count(), stride = (tiles + 1) * kTileRows;
  multiply_columns(matrix, 0, tiles, x, x_stride, tokens, sums, stride, false);
  finish_rows(matrix, tokens, sums, stride, out);
}

void outer_columns(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles,
                   int64_t x_tile_bytes, int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t*) {
  const PackedRows rows{x_tiles, x_tile_bytes, (matrix.cols + 15) / 16};
  (add ? multiply_bf16<true, PackedRows> : multiply_bf16<false, PackedRows>)(matrix, tile_begin, tile_end, rows, tokens,
                                                                             y, y_stride);
}

void produce_strips(const Matrix& matrix, const uint8_t* strips, int64_t tokens, const uint8_t* next, float* sums,
                    const ProductOutput& out) {
  multiply_segments(StripProduct(matrix, strips, tokens, next, sums), kBlockColumns / 32,
                    [&](const PairSums& pair) { finish_pair(out, pair); });
}

void outer_strips(const Matrix& matrix, const uint8_t* strips, int64_t tokens, const uint8_t* next, float* sums,
                  float* y, int64_t y_stride, bool add) {
  multiply_segments(StripProduct(matrix, strips, tokens, next, sums), kOuterColumns / 32,
                    [&](const PairSums& pair) { add_pair(y, y_stride, add, pair); });
  _mm_sfence();
}

constexpr StripKernel kStrips = {pack_strip_rows, pack_strip_columns, produce_strips, outer_strips};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
