#include "runtime/steps/part_products.h"

namespace ckdist {
namespace {

constexpr int64_t kPackedBytes = 512 << 10;  // bytes of an item's tiles, which stay in the L2 cache
constexpr int64_t kMaxTiles = 12;            // maximum tiles of an item
constexpr int64_t kUnpackedRows = 32;        // rows that are unpacked, or packed transposed, at a time
constexpr int64_t kTransposed = 64;          // tokens that are transposed at a time

}  // namespace

int64_t PartProducts::item_tiles(const Training& r, int64_t rows, int64_t cols, int matrices) {
  const int64_t all = std::max<int64_t>(tiles_of(rows), 1),
                most = std::clamp<int64_t>(kPackedBytes / (r.tile_bytes(cols) * matrices), 1, kMaxTiles);
  return parts_of(all, parts_of(all, most));
}

int64_t PartProducts::unpacked_floats(const Training& r, int32_t parameter) {
  return r.in_place(parameter) ? 0 : kUnpackedRows * r.shape(parameter).cols;
}

Matrix PartProducts::pack(const ParameterPart& part, uint8_t* tiles) const {
  const int64_t stride = r_.shape(part.parameter).cols;
  const Matrix matrix = r_.matrix(part.rows, part.columns, tiles);
  for (int64_t tile = 0; tile < matrix.tile_count(); ++tile) {
    const int64_t row = tile * kTileRows, rows = std::min<int64_t>(kTileRows, part.rows - row);
    const float* const x = r_.parameter_rows(part.parameter, part.row + row, rows, unpacked_);
    r_.packing.rows(x + part.column, stride, int(rows), part.columns, tiles + tile * matrix.tile_bytes);
  }
  return matrix;
}

// A few rows at a time: the tiles' parts of a row lie side by side.
Matrix PartProducts::pack_transposed(const ParameterPart& part, uint8_t* tiles, int64_t tile_bytes) const {
  const int64_t stride = r_.shape(part.parameter).cols;
  Matrix matrix = r_.matrix(part.columns, part.rows, tiles);
  if (tile_bytes > 0) matrix.tile_bytes = tile_bytes;
  for (int64_t row = 0; row < part.rows; row += kUnpackedRows) {
    const int64_t rows = std::min(kUnpackedRows, part.rows - row);
    const float* const x = r_.parameter_rows(part.parameter, part.row + row, rows, unpacked_) + part.column;
    for (int64_t tile = 0; tile < matrix.tile_count(); ++tile)
      r_.packing.columns(x + tile * kTileRows, stride,
                         int(std::min<int64_t>(kTileRows, part.columns - tile * kTileRows)), rows,
                         tiles + tile * matrix.tile_bytes + row * r_.column_bytes());
  }
  return matrix;
}

Operand PartProducts::gather(int value, const int32_t* tokens, int64_t rows, uint8_t* to) const {
  const Operand gathered{to, r_.row_stride(value)};
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(r_.operand(value, tokens[row]).at, r_.row_bytes(value), gathered.row(row));
  return gathered;
}

int64_t PartProducts::transposed_bytes(const Training& r, int64_t columns) {
  return tiles_of(columns) * r.tile_bytes(kOuterColumns);
}

int64_t PartProducts::narrow_bytes(const Training& r, int64_t columns) {
  return kTransposed * Training::stride(columns, r.element_bytes());
}

Matrix PartProducts::transpose(int value, const int32_t* tokens, int64_t first, int64_t rows, int64_t column,
                               int64_t columns, uint8_t* tiles, uint8_t* narrow) const {
  const Matrix matrix = r_.matrix(columns, rows, tiles);
  const int64_t bytes = r_.element_bytes();
  for (int64_t row = 0; row < rows; row += kTransposed) {
    const int64_t some = std::min(kTransposed, rows - row);
    Operand x = r_.operand(value, first + row);
    x.at += column * bytes;
    if (tokens) {
      x = {narrow, Training::stride(columns, bytes)};
      for (int64_t i = 0; i < some; ++i)
        std::copy_n(r_.operand(value, tokens[row + i]).at + column * bytes, columns * bytes, x.row(i));
    }
    r_.pack_columns(x, some, columns, tiles + row * r_.column_bytes(), matrix.tile_bytes);
  }
  return matrix;
}

void PartProducts::outer(const Matrix& y, const Matrix& x, float* to, int64_t stride, bool add) const {
  r_.product.outer(x, 0, x.tile_count(), y.tiles, y.tile_bytes, y.rows, to, stride, add, nullptr);
}

}  // namespace ckdist
