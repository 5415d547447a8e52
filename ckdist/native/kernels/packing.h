// Packs float values for a matrix product: as the matrix, or as activations, transposed if necessary.
//
// The layouts are those of kernels/linear.h for Type::f32 with activations in float32, and for Type::bf16 with
// activations in bfloat16. For bfloat16 without its dot product (kernels/product.h), tiles hold floats that were
// rounded to bfloat16.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

// Operands are values in the form of activations: rows of floats or of bfloat16, `stride` bytes apart.
struct PackKernel {
  // One tile whose row r is x[r * stride ...], with `cols` columns. Missing rows, and columns up to the next multiple
  // of 16, become zeros.
  void (*rows)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // One tile whose column c is x[c * stride ...], with `rows` elements: the matrix is x transposed.
  void (*columns)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // The same for operands.
  void (*operand_rows)(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // Up to two tiles of columns, which are tile_bytes apart.
  void (*operand_columns)(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tiles, int64_t tile_bytes);
  // convert: an operand of `padded` elements from n floats, followed by zeros. widen: n floats from an operand.
  void (*convert)(const float* x, int64_t n, int64_t padded, uint8_t* out);
  void (*widen)(const uint8_t* x, int64_t n, float* out);
};

// For values in float32 and in bfloat16.
struct PackKernels {
  PackKernel f32, bf16;
};

}  // namespace ckdist
