// Codes and scales that a safetensors file has in tensors of their own, joined to the blocks of a weight type. No value
// changes by it.
#pragma once
#include <cstdint>
#include <vector>

#include "core/mapped_file.h"
#include "kernels/layout.h"

namespace ckdist {

// Where a tensor begins.
struct FilePlace {
  const MappedFile* file;
  int64_t offset;

  const uint8_t* data() const { return file->data() + offset; }
};

enum class CodeForm : int32_t {
  whole,    // the tensor has no scales: its bytes are blocks of its type
  bytes,    // a byte for each column
  nibbles,  // four bits for each column, the first in the low half of a byte
};

enum class ScaleForm : int32_t { f32, f16, bf16, exponent };  // the last: a byte, 2 to the power of (byte - 127)

// The scales of a matrix, or of each of a stack: one for every `rows_each` rows and `cols_each` columns.
struct Scales {
  CodeForm codes = CodeForm::whole;
  ScaleForm form = ScaleForm::f32;
  int64_t rows_each = 1, cols_each = 1;
  int64_t rows = 0, cols = 0;     // of scales in the tensor
  int64_t first_row = 0;          // of the rows that share this tensor of scales, where the matrix begins
  std::vector<FilePlace> places;  // of each matrix
  // Of each matrix: zero points of four bits, eight rows in 32 bits, [rows / 8][cols of scales]. Empty: all are 8.
  std::vector<FilePlace> zeros;

  int64_t code_bytes(int64_t columns) const { return codes == CodeForm::bytes ? columns : columns / 2; }
  // Throws unless every matrix has its scales within a file, for `matrix_rows` x `matrix_cols`, and `type` can be made.
  void check(const char* name, Type type, int64_t matrix_rows, int64_t matrix_cols, size_t matrices) const;
};

// Blocks of `type` for columns [col, col + cols) of a row, multiples of 32, whose codes begin at `codes`. False where a
// scale or a code is no number, or a scale has more bits than the type keeps.
bool join_row(const Scales& scales, Type type, int64_t matrix, int64_t row, int64_t col, int64_t cols,
              const uint8_t* codes, uint8_t* out);

}  // namespace ckdist
