// Training's products of bfloat16 with AMX: large ones have both operands in strips, small ones read rows in place.
// Sums of each block of columns are added. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"
#include "kernels/isa/training_tiles.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t kBlockColumns = 2048;

void multiply_columns(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                      int64_t tokens, float* y, int64_t y_stride, bool add) {
  int configured = 0;
  for (int64_t column = 0; column < matrix.cols; column += kBlockColumns) {
    Matrix part = matrix;
    part.cols = least(kBlockColumns, matrix.cols - column), part.tiles += column * 2 * kTileRows;
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
      const int some = static_cast<int>(least(kTokensAtOnce, tokens - token));
      if (some != configured) configure(configured = some, kTileRowBytes);
      (add || column > 0 ? multiply_rows<true>
                         : multiply_rows<false>)(part, tile_begin, tile_end,
                                                 {x + column * 2 + token * x_stride, x_stride, kTileRowBytes, some},
                                                 y + token * y_stride, y_stride);
    }
  }
  if (configured) tile_release();
}

void outer_columns(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles,
                   int64_t x_tile_bytes, int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t*) {
  alignas(64) uint8_t strip[strip_bytes(kOuterColumns)];
  int configured = 0;
  for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
    const int some = static_cast<int>(least(kTokensAtOnce, tokens - token));
    if (some != configured) configure(configured = some, kTileRowBytes);
    pack_strip_tiles(x_tiles + token / kTileRows * x_tile_bytes, x_tile_bytes, some, matrix.cols, strip);
    (add ? multiply_rows<true> : multiply_rows<false>)(matrix, tile_begin, tile_end,
                                                       {strip, kTileRowBytes, kStepOfStrip, some}, y + token * y_stride,
                                                       y_stride);
  }
  if (configured) tile_release();
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
