// The matrix products of training: kernels/linear.h's for Type::f32 and Type::bf16, with sums that may be added to what is there.
//
// Sums are made of blocks of columns, each added up by itself: the error of a sum grows with its length.
#pragma once
#include "kernels/linear.h"

namespace ckdist {

// y[t * y_stride + row] = dot(matrix[row], x[t]), or += where `add`, for the rows of tiles [tile_begin, tile_end), row 0 being the
// first of tile 0. x: rows of x_stride bytes, finite up to the next multiple of 32 columns.
using Multiply = void (*)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y,
                          int64_t y_stride, bool add);

// The two forms in which training multiplies.
struct ProductKernels {
  Multiply f32, bf16;
};

}  // namespace ckdist
