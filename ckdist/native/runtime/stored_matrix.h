// A part of a tensor in its mapped file, and the packing of its rows to tiles.
#pragma once
#include "kernels/layout_blocks.h"
#include "kernels/quantize.h"
#include "runtime/joined_rows.h"

namespace ckdist {

// The rows that a matrix takes of each head of a tensor; see ckdist_head_part.
struct HeadPart {
  int64_t stored, first, rows, columns;  // stored = 0: the matrix is the tensor
  bool transposed;
  int64_t every, lane;
  int64_t width;  // at least 1 if transposed
};

// A tensor in its file, a part of its heads, or a stack of such matrices of one shape, each with its own place.
struct Source {
  std::string name;
  std::vector<FilePlace> places;  // one for each matrix of the stack
  Type type;
  int64_t rows, cols;  // of one matrix; a vector is one column
  int64_t head_rows;   // > 0: the two halves of each head of this many rows are stored interleaved
  HeadPart part;
  Scales scales;  // only for codes; without scales, rows are blocks of the type

  const MappedFile& file() const { return *places[0].file; }
  int64_t offset() const { return places[0].offset; }
  bool is_joined() const { return scales.codes != CodeForm::whole; }
  // Bytes of `columns` columns of a row.
  int64_t bytes(int64_t columns) const;
  // Throws unless the tensor lies within its file.
  void check() const;
};

struct RowRange {
  int64_t begin, end;
};

// Rows of several ranges, concatenated, and columns [col_begin, col_end). In a stack every matrix has these rows and
// begins with a new tile.
class StoredMatrix {
 public:
  // Throws if the part is not within the tensor, or cannot be packed as `packed_type`.
  StoredMatrix(Source source, Type packed_type, std::vector<RowRange> rows, int64_t col_begin, int64_t col_end);

  const Source& source() const { return source_; }
  const Matrix& shape() const { return shape_; }  // without tiles
  int64_t stored_bytes() const { return count() * rows_each_ * segment_bytes_; }

  // Buffers for quantising while packing. They are reused and only grow.
  struct Rows {
    std::vector<float> floats;       // one row
    std::vector<uint8_t> quantized;  // sixteen rows
  };
  // Packs tiles [begin, end) to `out`. Throws if a value cannot be quantised. If a file fails during packing, its bytes
  // read as zeros: call check() of the file before publishing the results.
  void pack(int64_t begin, int64_t end, uint8_t* out, Rows* rows = nullptr) const;
  // Packs one row, as row 0 of the tile at `out`. The rows of a stack's matrices follow one another. If joined codes or
  // scales are not finite, the file is rejected.
  void pack_row(int64_t row, uint8_t* out) const;
  // Asks the system to begin reading the bytes that pack_row(row) will need.
  void will_need_row(int64_t row) const;
  void check_files() const;  // throws if a file of the matrix has failed
  // Asks the system to begin reading the bytes that pack(begin, end) will need.
  void will_need(int64_t begin, int64_t end) const;

 private:
  int64_t stored_row(int64_t row) const;  // the tensor's row in the file for row `row` of this part
  const uint8_t* row_at(const FilePlace& place, int64_t row) const {
    return place.file->data() + place.offset + stored_row(row) * row_bytes_ + segment_begin_;
  }
  // Packs rows of matrix `matrix`. Joins their codes and scales a few columns at a time.
  void pack_joined(int64_t matrix, int64_t first, int count, uint8_t* out) const;
  // Joins the blocks of some columns of a stored row.
  void join(int64_t matrix, int64_t stored, int64_t col, int64_t cols, uint8_t* out) const;
  // Reads a row in float32.
  void read_floats(int64_t matrix, int64_t row, float* out) const;
  int64_t count() const { return int64_t(source_.places.size()); }
  int64_t tiles_each() const { return (rows_each_ + kTileRows - 1) / kTileRows; }
  void gather(int64_t matrix, int64_t row, int count, float* out) const;

  Source source_;
  std::vector<RowRange> rows_;
  int64_t rows_each_ = 0;  // rows of each matrix
  int64_t row_bytes_;      // bytes of a whole stored row
  int64_t segment_begin_;  // byte offset of the first wanted column in a row
  int64_t segment_bytes_;
  int64_t col_begin_;
  void (*pack_)(const uint8_t* const*, int, int64_t, uint8_t*);
  int64_t (*tile_bytes_)(int64_t cols);
  QuantizeRow quantize_ = nullptr;  // null: packed as stored
  bool widens_ = false;             // packed as float32
  Matrix shape_;
};

// Elements [begin, end) of a vector of F32, F16 or BF16, as float32. `plus_one`: adds 1 to each. `exp_sign`, unless 0:
// log(exp_sign * x) of each. `factor`: on each.
struct StoredVector {
  Source source;
  int64_t begin, end;
  bool plus_one;
  int exp_sign;
  float factor;

  void check() const;
  int64_t stored_bytes() const;
  void read(float* out) const;
};

}  // namespace ckdist
