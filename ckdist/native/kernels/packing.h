// Float values on their way into a matrix product: packed as the matrix, or prepared as the activations, transposed
// where needed.
//
// The layouts are those of kernels/linear.h for Type::f32 with activations in float32 and Type::bf16 with activations
// in bfloat16; of bfloat16 without its dot product (kernels/product.h), tiles of floats that were rounded to bfloat16.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

// Operands are values as activations stand: rows of floats or of bfloat16, `stride` bytes apart.
struct PackKernel {
  // One tile whose row r is x[r * stride ...], `cols` columns; missing rows and columns up to the next multiple of 16
  // become zeros.
  void (*rows)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // One tile whose column c is x[c * stride ...], `rows` elements of it: the matrix is x transposed.
  void (*columns)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // The same of operands.
  void (*operand_rows)(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // Up to two tiles of columns, tile_bytes apart.
  void (*operand_columns)(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tiles, int64_t tile_bytes);
  // An operand of `padded` elements from n floats, zeros behind them; and n floats from an operand.
  void (*convert)(const float* x, int64_t n, int64_t padded, uint8_t* out);
  void (*widen)(const uint8_t* x, int64_t n, float* out);
};

// Of values in float32 and in bfloat16.
struct PackKernels {
  PackKernel f32, bf16;
};

}  // namespace ckdist
