// Products with parts of parameters. A thread packs a part itself and multiplies while it is in its L2 cache. So a step
// with many matrices (of experts or heads) has no barrier between packing and products, and stores no packed copy.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// Rows [row, row + rows) and columns [column, column + columns) of a parameter.
struct ParameterPart {
  int32_t parameter;
  int64_t row, rows, column, columns;
};

// Products of one thread; no method waits for another thread.
class PartProducts {
 public:
  static constexpr int64_t kRows = 64;        // rows of activations that are multiplied at a time
  static constexpr int64_t kOuterTiles = 24;  // tiles of one factor of a gradient, which stay in the L2 cache
  static constexpr int64_t kOuterRows = 64;   // columns of the other factor

  PartProducts(const Training& r, float* unpacked) : r_(r), unpacked_(unpacked) {}

  // Tiles of each of `matrices` matrices, (rows, cols), that an item packs. Items are as even as possible.
  static int64_t item_tiles(const Training& r, int64_t rows, int64_t cols, int matrices);
  // Size of `unpacked`: if the parameter is not stored as floats, the rows that are unpacked at a time.
  static int64_t unpacked_floats(const Training& r, int32_t parameter);

  // Packs the part as a matrix: (rows, columns), or transposed (columns, rows), `tile_bytes` from tile to tile if it is
  // a part of a matrix of more columns.
  Matrix pack(const ParameterPart& part, uint8_t* tiles) const;
  Matrix pack_transposed(const ParameterPart& part, uint8_t* tiles, int64_t tile_bytes = 0) const;

  // Gathers the rows of `tokens`, `row_stride(value)` bytes apart.
  Operand gather(int value, const int32_t* tokens, int64_t rows, uint8_t* to) const;

  // Bytes of `tiles` and of `narrow` in `transpose`.
  static int64_t transposed_bytes(const Training& r, int64_t columns);
  static int64_t narrow_bytes(const Training& r, int64_t columns);
  // Packs columns [column, column + columns) of at most kOuterColumns rows of a value, transposed: (columns, rows). The
  // rows are those of `tokens`, or, if `tokens` is null, the rows from `first` on.
  Matrix transpose(int value, const int32_t* tokens, int64_t first, int64_t rows, int64_t column, int64_t columns,
                   uint8_t* tiles, uint8_t* narrow) const;
  // to[i][j] (+)= sum over rows of y[row][i] * x[row][j]. Both factors are transposed; y has at most kOuterRows
  // columns.
  void outer(const Matrix& y, const Matrix& x, float* to, int64_t stride, bool add) const;

 private:
  const Training& r_;
  float* const unpacked_;
};

}  // namespace ckdist
