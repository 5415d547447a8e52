// A part of a tensor as it lies in its mapped file, and how its rows become packed tiles.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "kernels/linear.h"
#include "kernels/quantize.h"

namespace ckdist {

// A whole tensor in its file.
struct Source {
  std::string name;
  const MappedFile* file;
  Type type;
  int64_t offset;
  int64_t rows, cols;  // a vector is one column
  int64_t head_rows;   // > 0: the two halves of each head of this many rows are stored interleaved

  // Throws unless the tensor lies within its file.
  void check() const;
};

struct RowRange {
  int64_t begin, end;
};

// The rows of some ranges, one after the other, and columns [col_begin, col_end).
class StoredMatrix {
 public:
  // Throws where the part is not one of the tensor, or cannot become `packed_type`.
  StoredMatrix(Source source, Type packed_type, std::vector<RowRange> rows, int64_t col_begin, int64_t col_end);

  const Source& source() const { return source_; }
  const Matrix& shape() const { return shape_; }  // without tiles
  int64_t stored_bytes() const { return shape_.rows * segment_bytes_; }

  // What quantising while packing needs besides; it grows and stays.
  struct Rows {
    std::vector<float> floats;       // one row
    std::vector<uint8_t> quantized;  // sixteen
  };
  // Tiles [begin, end), which are written from `out` on. Throws where a value cannot be quantised. Bytes of a file that
  // fails meanwhile read as zeros: who shows others what came of it calls check() of the file before.
  void pack(int64_t begin, int64_t end, uint8_t* out, Rows* rows = nullptr) const;
  // One row, as row 0 of the tile at `out`.
  void pack_row(int64_t row, uint8_t* out) const;
  // Asks the system to begin reading what pack(begin, end) will need.
  void will_need(int64_t begin, int64_t end) const;

 private:
  int64_t stored_row(int64_t row) const;  // of the tensor's rows in the file, where row `row` of this part is
  const uint8_t* row_at(int64_t row) const {
    return source_.file->data() + source_.offset + stored_row(row) * row_bytes_ + segment_begin_;
  }

  Source source_;
  std::vector<RowRange> rows_;
  int64_t row_bytes_;      // of a whole stored row
  int64_t segment_begin_;  // of the wanted columns in it, in bytes
  int64_t segment_bytes_;
  void (*pack_)(const uint8_t* const*, int, int64_t, uint8_t*);
  QuantizeRow quantize_ = nullptr;  // null: packed as stored
  Matrix shape_;
};

// Elements [begin, end) of a vector of F32, F16 or BF16, as float32; `plus_one`: of each one more.
struct StoredVector {
  Source source;
  int64_t begin, end;
  bool plus_one;

  void check() const;
  int64_t stored_bytes() const;
  void read(float* out) const;
};

}  // namespace ckdist
