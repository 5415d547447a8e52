// Float values on their way into a matrix product: packed as the matrix, or prepared as the activations, turned where needed.
//
// The layouts are those of kernels/linear.h for Type::f32 with activations in float32 and Type::bf16 with activations in bfloat16.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

struct PackKernel {
  // One tile whose row r is x[r * stride ...], `cols` columns; missing rows and columns up to the next multiple of 16 become zeros.
  void (*rows)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // One tile whose column c is x[c * stride ...], `rows` elements of it: the matrix is x turned.
  void (*columns)(const float* x, int64_t stride, int rows, int64_t cols, uint8_t* tile);
  // `padded` activations from n floats, zeros behind them.
  void (*convert)(const float* x, int64_t n, int64_t padded, uint8_t* out);
  // Activations of x turned: row c < cols of `out` holds column c of x's `rows` rows, and zeros up to `padded`.
  void (*turn)(const float* x, int64_t stride, int64_t rows, int64_t cols, uint8_t* out, int64_t out_stride, int64_t padded);
};

// The two forms in which training multiplies.
struct PackKernels {
  PackKernel f32, bf16;
};

}  // namespace ckdist
