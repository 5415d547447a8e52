// Writes the sums of training's products, for all ways of computing them. Private to isa/.
#pragma once
#include "kernels/isa/simd.h"
#include "kernels/product.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// The elements of tiles and rows: floats; pairs of bfloat16; or floats in tiles and bfloat16 in rows, which is widened
// before the product.
enum class Form { f32, bf16, widened };

template <Form form>
constexpr int kFormBytes = form == Form::widened ? 2 : 4;  // bytes of a row's columns in one step
template <Form form>
constexpr Type kTiles = form == Form::bf16 ? Type::bf16 : Type::f32;
template <Form form>
constexpr int64_t words_of(int64_t cols) {
  return (cols + 15) / 16 * 16 / (form == Form::bf16 ? 2 : 1);
}

// Converts `rows` rows of n bfloat16, n a multiple of 16, to floats.
CKDIST_INLINE void widen_rows(const uint8_t* x, int64_t x_stride, int rows, int64_t n, float* out, int64_t stride) {
  for (int row = 0; row < rows; ++row, x += x_stride, out += stride)
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, load_bf16(reinterpret_cast<const uint16_t*>(x) + i));
}

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Writes `lanes` sums of a token, from `column` on.
CKDIST_INLINE void finish(const ProductOutput& out, int64_t token, int64_t column, int lanes, Vec sum) {
  if (out.bias) sum = sum + CKDIST_VECTORS::load(out.bias + column);
  if (out.residual) sum = sum + load_n(out.residual + token * out.residual_stride + column, lanes);
  uint8_t* const row = out.at + token * out.stride;
  if (out.narrow) store_bf16(reinterpret_cast<uint16_t*>(row) + column, sum);
  else store(reinterpret_cast<float*>(row) + column, sum);
}

// Writes all sums of `tokens` tokens, which are `stride` floats apart.
CKDIST_INLINE void finish_rows(const Matrix& matrix, int64_t tokens, const float* sums, int64_t stride,
                               const ProductOutput& out) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t row = 0; row < matrix.rows; row += kTileRows) {
      const int rows = static_cast<int>(least(kTileRows, matrix.rows - row));
      finish(out, t, row, rows, load_n(sums + t * stride + row, rows));
    }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
