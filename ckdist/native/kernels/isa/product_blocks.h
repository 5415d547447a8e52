// Products of training, as the products of inference in blocks of columns, which are added. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"

namespace ckdist {
namespace CKDIST_VECTORS {
extern const LinearKernel f32_kernel;
}
namespace CKDIST_ISA {

extern const LinearKernel bf16_kernel;

namespace {

constexpr int64_t kTokensAtOnce = 32, kTilesAtOnce = 4;
template <Form form>
constexpr int64_t kBlockColumns = form == Form::widened ? 256 : 2048;
template <Form form>
// The widened rows of these tokens are on the stack.
constexpr int64_t kTokensOfBlock = form == Form::widened ? 32 : INT64_MAX;

template <Form form>
const LinearKernel& linear_kernel() {
  if constexpr (form == Form::bf16) return bf16_kernel;
  else return CKDIST_VECTORS::f32_kernel;
}

// One block of columns of a matrix.
template <Form form>
void multiply_block(const Matrix& part, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                    int64_t tokens, float* y, int64_t y_stride, bool add) {
  constexpr int64_t row = kTilesAtOnce * kTileRows;
  const LinearKernel& kernel = linear_kernel<form>();
  if (!add) return kernel.multiply(part, tile_begin, tile_end, x, x_stride, tokens, y, y_stride);
  alignas(64) float sums[kTokensAtOnce * row];
  for (int64_t tile = tile_begin; tile < tile_end; tile += kTilesAtOnce) {
    Matrix some = part;
    some.rows = least(least(row, (tile_end - tile) * kTileRows), part.rows - tile * kTileRows);
    some.tiles += tile * part.tile_bytes;
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
      const int64_t n = least(kTokensAtOnce, tokens - token);
      kernel.multiply(some, 0, least(kTilesAtOnce, tile_end - tile), x + token * x_stride, x_stride, n, sums, row);
      for (int64_t t = 0; t < n; ++t)
        for (int64_t r = 0; r < some.rows; ++r) y[(token + t) * y_stride + tile * kTileRows + r] += sums[t * row + r];
    }
  }
}

template <Form form>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
              int64_t tokens, float* y, int64_t y_stride, bool add) {
  constexpr int64_t block = kBlockColumns<form>, row = block + 16;
  for (int64_t column = 0; column < matrix.cols; column += block) {
    Matrix part = matrix;
    part.cols = least(block, matrix.cols - column), part.tiles += column * (form == Form::bf16 ? 2 : 4) * kTileRows;
    for (int64_t token = 0; token < tokens; token += kTokensOfBlock<form>) {
      const int64_t n = least(kTokensOfBlock<form>, tokens - token);
      const uint8_t* rows = x + token * x_stride + column * (form == Form::f32 ? 4 : 2);
      int64_t stride = x_stride;
      alignas(64) float wide[form == Form::widened ? kTokensOfBlock<form> * row : 1];
      if constexpr (form == Form::widened) {
        widen_rows(rows, x_stride, static_cast<int>(n), words_of<form>(part.cols), wide, row);
        rows = reinterpret_cast<const uint8_t*>(wide), stride = 4 * row;
      }
      multiply_block<form>(part, tile_begin, tile_end, rows, stride, n, y + token * y_stride, y_stride,
                           add || column > 0);
      if constexpr (form != Form::widened) break;
    }
  }
}

template <Form form>
void produce(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums,
             const ProductOutput& out) {
  const int64_t tiles = matrix.tile_count(), stride = (tiles + 1) * kTileRows;
  multiply<form>(matrix, 0, tiles, x, x_stride, tokens, sums, stride, false);
  finish_rows(matrix, tokens, sums, stride, out);
}

template <Form form>
void outer(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles, int64_t x_tile_bytes,
           int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t*) {
  constexpr int64_t row = kOuterColumns / (form == Form::bf16 ? 2 : 1) + 16;  // words
  const int64_t words = words_of<form>(matrix.cols);
  alignas(64) float rows[kTileRows * row];
  for (int64_t token = 0; token < tokens; token += kTileRows, x_tiles += x_tile_bytes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i)
        block[i] =
            word + i < words ? load(reinterpret_cast<const float*>(x_tiles) + (word + i) * kTileRows) : set(0.0f);
      transpose(block);
      for (int t = 0; t < kTileRows; ++t) store(rows + t * row + word, block[t]);
    }
    multiply<form == Form::bf16 ? Form::bf16 : Form::f32>(
        matrix, tile_begin, tile_end, reinterpret_cast<const uint8_t*>(rows), row * 4, least(kTileRows, tokens - token),
        y + token * y_stride, y_stride, add);
  }
}

template <Form form>
constexpr ProductKernel product_kernel() {
  return {kTiles<form>, multiply<form>, produce<form>, outer<form>};
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
