// Products of training as those of inference, in blocks of columns that are added. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"

namespace ckdist {
namespace CKDIST_VECTORS { extern const LinearKernel f32_kernel; }
namespace CKDIST_ISA {

extern const LinearKernel bf16_kernel;

namespace {

constexpr int64_t kBlockColumns = 2048, kTokensAtOnce = 32, kTilesAtOnce = 4;

template <bool bf16>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
              bool add) {
  const LinearKernel& kernel = bf16 ? bf16_kernel : CKDIST_VECTORS::f32_kernel;
  constexpr int64_t element = bf16 ? 2 : 4, row = kTilesAtOnce * kTileRows;
  for (int64_t column = 0; column < matrix.cols; column += kBlockColumns) {
    Matrix part = matrix;
    part.cols = least(kBlockColumns, matrix.cols - column), part.tiles += column * element * kTileRows;
    if (!add && column == 0) {
      kernel.multiply(part, tile_begin, tile_end, x, x_stride, tokens, y, y_stride);
      continue;
    }
    alignas(64) float sums[kTokensAtOnce * row];
    for (int64_t tile = tile_begin; tile < tile_end; tile += kTilesAtOnce) {
      Matrix some = part;
      some.rows = least(row, matrix.rows - tile * kTileRows), some.tiles += tile * matrix.tile_bytes;
      for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        const int64_t n = least(kTokensAtOnce, tokens - token);
        kernel.multiply(some, 0, least(kTilesAtOnce, tile_end - tile), x + token * x_stride + column * element, x_stride, n, sums, row);
        for (int64_t t = 0; t < n; ++t)
          for (int64_t r = 0; r < some.rows; ++r) y[(token + t) * y_stride + tile * kTileRows + r] += sums[t * row + r];
      }
    }
  }
}

template <bool bf16>
void produce(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums, const ProductOutput& out) {
  const int64_t tiles = matrix.tile_count(), stride = (tiles + 1) * kTileRows;
  multiply<bf16>(matrix, 0, tiles, x, x_stride, tokens, sums, stride, false);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int rows = static_cast<int>(least(kTileRows, matrix.rows - tile * kTileRows));
      finish(out, t, tile * kTileRows, rows, load_n(sums + t * stride + tile * kTileRows, rows));
    }
}

template <bool bf16>
void outer(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles, int64_t x_tile_bytes, int64_t tokens, float* y,
           int64_t y_stride, bool add, const uint8_t*) {
  constexpr int64_t row = kOuterColumns / (bf16 ? 2 : 1) + 16;  // words
  const int64_t words = (matrix.cols + 15) / 16 * 16 / (bf16 ? 2 : 1);
  alignas(64) float rows[kTileRows * row];
  for (int64_t token = 0; token < tokens; token += kTileRows, x_tiles += x_tile_bytes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = word + i < words ? load(reinterpret_cast<const float*>(x_tiles) + (word + i) * kTileRows) : set(0.0f);
      transpose(block);
      for (int t = 0; t < kTileRows; ++t) store(rows + t * row + word, block[t]);
    }
    multiply<bf16>(matrix, tile_begin, tile_end, reinterpret_cast<const uint8_t*>(rows), row * 4, least(kTileRows, tokens - token), y + token * y_stride,
                   y_stride, add);
  }
}

template <bool bf16>
constexpr ProductKernel product_kernel() {
  return {multiply<bf16>, produce<bf16>, outer<bf16>};
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
