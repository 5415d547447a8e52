// A part of a tensor as it lies in its mapped file, and how its rows become packed tiles.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "kernels/layout_blocks.h"
#include "kernels/linear.h"
#include "kernels/quantize.h"
#include "runtime/joined_rows.h"

namespace ckdist {

// What of each head's rows in a tensor a matrix takes; see ckdist_head_part.
struct HeadPart {
  int64_t stored, first, rows, columns;  // stored = 0: the matrix is the tensor
  bool transposed;
  int64_t every, lane;
};

// A tensor in its file, or a part of its heads; or a stack of such matrices of one shape, each of which has a place of
// its own.
struct Source {
  std::string name;
  std::vector<FilePlace> places;  // of each matrix of the stack
  Type type;
  int64_t rows, cols;  // of one matrix; a vector is one column
  int64_t head_rows;   // > 0: the two halves of each head of this many rows are stored interleaved
  HeadPart part;
  Scales scales;  // of codes alone; where there are none, rows are blocks of the type

  const MappedFile& file() const { return *places[0].file; }
  int64_t offset() const { return places[0].offset; }
  bool is_joined() const { return scales.codes != CodeForm::whole; }
  // Bytes of `columns` of a row.
  int64_t bytes(int64_t columns) const;
  // Throws unless the tensor lies within its file.
  void check() const;
};

struct RowRange {
  int64_t begin, end;
};

// The rows of some ranges, one after the other, and columns [col_begin, col_end). Of a stack these of each matrix,
// which begins with a tile of its own.
class StoredMatrix {
 public:
  // Throws where the part is not one of the tensor, or cannot become `packed_type`.
  StoredMatrix(Source source, Type packed_type, std::vector<RowRange> rows, int64_t col_begin, int64_t col_end);

  const Source& source() const { return source_; }
  const Matrix& shape() const { return shape_; }  // without tiles
  int64_t stored_bytes() const { return count() * rows_each_ * segment_bytes_; }

  // What quantising while packing needs besides; it grows and stays.
  struct Rows {
    std::vector<float> floats;       // one row
    std::vector<uint8_t> quantized;  // sixteen
  };
  // Tiles [begin, end), which are written from `out` on. Throws where a value cannot be quantised. Bytes of a file that
  // fails meanwhile read as zeros: who shows others what came of it calls check() of the file before.
  void pack(int64_t begin, int64_t end, uint8_t* out, Rows* rows = nullptr) const;
  // What is joined and no number has the file rejected.
  // One row, as row 0 of the tile at `out`; not of a stack.
  void pack_row(int64_t row, uint8_t* out) const;
  // Asks the system to begin reading what pack(begin, end) will need.
  void will_need(int64_t begin, int64_t end) const;

 private:
  int64_t stored_row(int64_t row) const;  // of the tensor's rows in the file, where row `row` of this part is
  const uint8_t* row_at(const FilePlace& place, int64_t row) const {
    return place.file->data() + place.offset + stored_row(row) * row_bytes_ + segment_begin_;
  }
  // Rows of matrix `matrix` whose codes and scales are joined on the way, a few columns at a time.
  void pack_joined(int64_t matrix, int64_t first, int count, uint8_t* out) const;
  // Blocks of some columns of a stored row.
  void join(int64_t matrix, int64_t stored, int64_t col, int64_t cols, uint8_t* out) const;
  // A row in float32.
  void read_floats(int64_t matrix, int64_t row, float* out) const;
  int64_t count() const { return static_cast<int64_t>(source_.places.size()); }
  int64_t tiles_each() const { return (rows_each_ + kTileRows - 1) / kTileRows; }
  void gather(int64_t matrix, int64_t row, int count, float* out) const;

  Source source_;
  std::vector<RowRange> rows_;
  int64_t rows_each_ = 0;  // of each matrix
  int64_t row_bytes_;      // of a whole stored row
  int64_t segment_begin_;  // of the wanted columns in it, in bytes
  int64_t segment_bytes_;
  int64_t col_begin_;
  void (*pack_)(const uint8_t* const*, int, int64_t, uint8_t*);
  int64_t (*tile_bytes_)(int64_t cols);
  QuantizeRow quantize_ = nullptr;  // null: packed as stored
  bool widens_ = false;             // to float32
  Matrix shape_;
};

// Elements [begin, end) of a vector of F32, F16 or BF16, as float32; `plus_one`: of each one more. `minus_exp`: the
// logarithm of minus each.
struct StoredVector {
  Source source;
  int64_t begin, end;
  bool plus_one, minus_exp;

  void check() const;
  int64_t stored_bytes() const;
  void read(float* out) const;
};

}  // namespace ckdist
