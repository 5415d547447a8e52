// Joins codes and scales, which a safetensors file has in separate tensors, to the blocks of a weight type. No value
// changes.
#pragma once
#include <cstdint>
#include <vector>

#include "core/mapped_file.h"
#include "kernels/layout.h"

namespace ckdist {

// The beginning of a tensor in a file.
struct FilePlace {
  const MappedFile* file;
  int64_t offset;

  const uint8_t* data() const { return file->data() + offset; }
};

enum class CodeForm : int32_t {
  whole,    // no scale tensor: the bytes are blocks of the tensor's type
  bytes,    // a byte for each column
  nibbles,  // four bits for each column, the first in the low half of a byte
  // Words of 32 bits across rows. Scales are [cols of scales][rows], and zero points [cols of scales][rows / 8].
  columns,  // eight columns of a row, the first in the lowest bits: [columns / 8][rows]
  rows,     // eight rows of a column, in the order of kRowWordShifts: [columns][rows / 8]
};

// Bits before the code of each of eight rows in a word.
constexpr int kWordShifts[8] = {0, 4, 8, 12, 16, 20, 24, 28};
constexpr int kRowWordShifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};

// exponent: a byte, 2^(byte - 127). e4m3: a code without sign, times the matrix's factor.
enum class ScaleForm : int32_t { f32, f16, bf16, exponent, e4m3 };

// The scales of a matrix, or of each matrix of a stack: one for every `rows_each` rows and `cols_each` columns.
struct Scales {
  CodeForm codes = CodeForm::whole;
  ScaleForm form = ScaleForm::f32;
  int64_t rows_each = 1, cols_each = 1;
  int64_t rows = 0, cols = 0;  // shape of the scale tensor
  // Index of the matrix's first row among the rows that share this scale tensor.
  int64_t first_row = 0;
  std::vector<FilePlace> places;  // one for each matrix
  // For each matrix: zero points of four bits, eight rows in 32 bits, [rows / 8][cols of scales]. Empty: all are 8.
  std::vector<FilePlace> zeros;
  uint32_t zero_added = 0;  // is added to each word of zero points
  // Stored column of each column of the matrix, for groups that are no runs of stored columns. Empty: the same.
  std::vector<int32_t> order;
  std::vector<float> factors;  // one for each matrix; only for e4m3

  bool is_across() const { return codes == CodeForm::columns || codes == CodeForm::rows; }
  int64_t code_bytes(int64_t columns) const { return codes == CodeForm::bytes ? columns : columns / 2; }
  // Throws unless every matrix has its scales within a file, for `matrix_rows` x `matrix_cols`, and `type` is
  // supported.
  void check(const char* name, Type type, int64_t matrix_rows, int64_t matrix_cols, size_t matrices) const;
};

// Writes blocks of `type` for columns [col, col + cols) of a row; both are multiples of 32. `codes` is the code of the
// first column, or of the tensor's first row and column if codes are across rows, or of the row's first column with an
// order. Returns false if a scale or a code is NaN, or the type does not keep all bits of a scale or a zero point.
bool join_row(const Scales& scales, Type type, int64_t matrix, int64_t row, int64_t col, int64_t cols,
              const uint8_t* codes, uint8_t* out);

}  // namespace ckdist
