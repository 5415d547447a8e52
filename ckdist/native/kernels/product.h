// The matrix products of training: kernels/linear.h's for Type::f32 and Type::bf16, with sums that may be added to what
// is there.
//
// Where a level has no dot product of bfloat16, values stay bfloat16 in memory and tiles hold them as float32, which is
// exact: they are widened once, as they are packed, and multiply many tokens.
//
// Sums are made of blocks of columns, each added up by itself: the error of a sum grows with its length.
#pragma once
#include "kernels/linear.h"

namespace ckdist {

// Where results go that are finished in registers: element [token][row] of the matrix's first tile is at `at`.
struct ProductOutput {
  uint8_t* at;
  int64_t stride;                   // bytes from a token to the next
  bool narrow;                      // bfloat16, else float32
  const float* bias = nullptr;      // (rows,), whole tiles of it
  const float* residual = nullptr;  // added last; `residual_stride` floats from a token to the next
  int64_t residual_stride = 0;
};

struct ProductKernel {
  Type tiles;  // what tiles hold: Type::bf16 where rows of bfloat16 are multiplied as they are, else Type::f32; such
               // rows are widened on the way
  // y[t * y_stride + row] = dot(matrix[row], x[t]), or += where `add`, for the rows of tiles [tile_begin, tile_end),
  // row 0 being the first of tile 0. x: rows of x_stride bytes, finite up to the next multiple of 16 columns.
  void (*multiply)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                   int64_t tokens, float* y, int64_t y_stride, bool add);
  // The same of all tiles, plus bias and residual, to `out`; zeros for the rows that the last tile lacks. `sums`: room
  // for 16 floats a token and tile.
  void (*produce)(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums,
                  const ProductOutput& out);
  // multiply where x is packed as a matrix is: token t is row t % 16 of tile t / 16. At most kOuterColumns columns.
  // `next`, unless null: where the tiles of the next call stand, tile_bytes apart, counted as these are; they are
  // fetched meanwhile.
  void (*outer)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles,
                int64_t x_tile_bytes, int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t* next);
};

constexpr int64_t kOuterColumns = 512;

// Of values in float32 and in bfloat16.
struct ProductKernels {
  ProductKernel f32, bf16;
};

}  // namespace ckdist
