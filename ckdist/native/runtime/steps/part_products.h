// Products with parts of parameters that a thread packs for itself and multiplies while its L2 cache has them. A step
// with many matrices, of experts or of heads, has no barrier between packing and products, and holds no packed copy.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// Rows [row, row + rows) and columns [column, column + columns) of a parameter.
struct ParameterPart {
  int32_t parameter;
  int64_t row, rows, column, columns;
};

// What one thread does with operands and parts; nothing here waits for another.
class PartProducts {
 public:
  static constexpr int64_t kRows = 64;        // of activations that are multiplied at a time
  static constexpr int64_t kOuterTiles = 24;  // of one factor of a gradient's part: they stay in the L2 cache
  static constexpr int64_t kOuterRows = 64;   // of the other

  PartProducts(const Training& r, float* unpacked) : r_(r), unpacked_(unpacked) {}

  // Tiles that an item packs of each of so many matrices of `rows` by `cols`: as even as can be.
  static int64_t item_tiles(const Training& r, int64_t rows, int64_t cols, int matrices);
  // Floats of `unpacked`: of what is not held as floats, the rows that are unpacked at a time.
  static int64_t unpacked_floats(const Training& r, int32_t parameter);

  // The part as a matrix, and transposed: its columns are the matrix's rows.
  Matrix pack(const ParameterPart& part, uint8_t* tiles) const;
  Matrix pack_transposed(const ParameterPart& part, uint8_t* tiles) const;

  // Rows of a value one behind the other, `row_stride(value)` bytes apart.
  Operand gather(int value, const int32_t* tokens, int64_t rows, uint8_t* to) const;

  // Room for `transpose` of so many columns, and for the columns of a few tokens on the way there.
  static int64_t transposed_bytes(const Training& r, int64_t columns);
  static int64_t narrow_bytes(const Training& r, int64_t columns);
  // Columns [column, column + columns) of at most kOuterColumns rows of a value, of `tokens` or, where that is null, of
  // the rows from `first` on, as a matrix: its rows are the columns.
  Matrix transpose(int value, const int32_t* tokens, int64_t first, int64_t rows, int64_t column, int64_t columns,
                   uint8_t* tiles, uint8_t* narrow) const;
  // to[i][j] (+)= the sum over the rows of y[row][i] x[row][j], of at most kOuterRows columns i. Both are transposed.
  void outer(const Matrix& y, const Matrix& x, float* to, int64_t stride, bool add) const;

 private:
  const Training& r_;
  float* const unpacked_;
};

}  // namespace ckdist
