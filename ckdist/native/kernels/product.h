// The matrix products of training: those of kernels/linear.h for Type::f32 and Type::bf16, with sums that can be added
// to the output.
//
// If a level has no dot product of bfloat16, values are bfloat16 in memory and float32 in tiles, which is exact. They
// are widened once, when packed, and multiply many tokens.
//
// Sums consist of blocks of columns, each summed separately, because the error of a sum grows with its length.
#pragma once
#include "kernels/linear.h"

namespace ckdist {

// The destination of results that are completed in registers: element [token][row] of the matrix's first tile is at
// `at`.
struct ProductOutput {
  uint8_t* at;
  int64_t stride;                   // bytes from one token to the next
  bool narrow;                      // bfloat16, else float32
  const float* bias = nullptr;      // (rows,), padded to whole tiles
  const float* residual = nullptr;  // added last; `residual_stride` floats from one token to the next
  int64_t residual_stride = 0;
};

// Products with both operands in the order of tiles. A strip is 32 rows of activations of bfloat16, as [step of 32
// columns][row][32 columns]; missing rows and columns are zeros. Rows of the result are `tokens`.
struct StripKernel {
  // Packs up to 32 rows of x, or up to 32 columns of x: then the strip's columns are the `rows` rows of x.
  void (*pack_rows)(const uint8_t* x, int64_t stride, int64_t rows, int64_t cols, uint8_t* strip);
  void (*pack_columns)(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, uint8_t* strip);
  // ProductKernel::produce for at most kStripsTokens tokens and kStripsTiles tiles. `next`: tiles of the next call,
  // which are prefetched, or null. `sums`: kStripsSums floats.
  void (*produce)(const Matrix& matrix, const uint8_t* strips, int64_t tokens, const uint8_t* next, float* sums,
                  const ProductOutput& out);
  // The same, (+)= to y, in the order of additions of ProductKernel::outer with kOuterColumns columns a call.
  void (*outer)(const Matrix& matrix, const uint8_t* strips, int64_t tokens, const uint8_t* next, float* sums, float* y,
                int64_t y_stride, bool add);
};

constexpr int64_t kStripRows = 32, kStripsTokens = 512, kStripsTiles = 16;
constexpr int64_t kStripsSums = 2 * kStripsTokens * kStripsTiles * kTileRows;
constexpr int64_t strip_bytes(int64_t cols) { return (cols + 31) / 32 * 64 * kStripRows; }

struct ProductKernel {
  Type tiles;  // of tiles: bf16 if rows of bfloat16 are multiplied directly, else f32; then such rows are widened
  // y[t * y_stride + row] = dot(matrix[row], x[t]), or += if `add`, for the rows of tiles [tile_begin, tile_end),
  // where row 0 is the first of tile 0. x: rows of x_stride bytes, finite up to the next multiple of 16 columns.
  void (*multiply)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                   int64_t tokens, float* y, int64_t y_stride, bool add);
  // The same for all tiles, plus bias and residual, to `out`. Writes zeros for the missing rows of the last tile.
  // `sums`: 16 floats for each token and tile. Null if the level has strips.
  void (*produce)(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums,
                  const ProductOutput& out);
  // multiply with x packed like a matrix: token t is row t % 16 of tile t / 16. At most kOuterColumns columns. `next`:
  // the tiles of the next call, with the same numbering, tile_bytes apart, which are prefetched; or null.
  void (*outer)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles,
                int64_t x_tile_bytes, int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t* next);
  const StripKernel* strips = nullptr;  // if the level has tiles
};

constexpr int64_t kOuterColumns = 512;

// For values in float32 and in bfloat16.
struct ProductKernels {
  ProductKernel f32, bf16;
};

}  // namespace ckdist
