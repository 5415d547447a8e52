#include "runtime/stored_matrix.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

namespace ckdist {
namespace {

// Columns joined at a time, so that they fit the stack and the L1 cache.
constexpr int kJoinedColumns = 512, kJoinedBlockBytes = 36;

bool is_float(Type type) { return type == Type::f32 || type == Type::f16 || type == Type::bf16; }

int64_t bytes_of(Type type, int64_t elements) {
  const TypeTraits& traits = type_traits(type);
  return elements / traits.block_elements * traits.block_bytes;
}

void to_float(Type type, const uint8_t* stored, int64_t n, float* out) {
  if (type == Type::f32) {
    std::memcpy(out, stored, size_t(n) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, stored + 2 * i, sizeof bits);
    out[i] = type == Type::f16 ? float_of_half(bits) : float_of_bf16(bits);
  }
}

// Index in the file of row `row` of a tensor whose heads have interleaved halves.
int64_t interleaved(int64_t row, int64_t head_rows) {
  if (!head_rows) return row;
  const int64_t in_head = row % head_rows, half_rows = head_rows / 2;
  return row - in_head + 2 * (in_head % half_rows) + in_head / half_rows;
}

}  // namespace

void Source::check() const {
  const TypeTraits& traits = type_traits(type);
  if (!traits.block_elements) fail(Status::native, "%s has unknown type %d", name.c_str(), int(type));
  if (rows <= 0 || cols <= 0 || (part.stored ? part.columns : cols) % traits.block_elements)
    fail(Status::native, "%s of type %s cannot have %" PRId64 " rows of %" PRId64, name.c_str(), traits.name, rows,
         cols);
  if (head_rows < 0 || head_rows % 2 || (head_rows && rows % head_rows))
    fail(Status::native, "%s has %" PRId64 " rows, which heads of %" PRId64 " do not divide", name.c_str(), rows,
         head_rows);
  if (part.stored &&
      (part.first < 0 || part.rows <= 0 || part.first + part.rows > part.stored || part.every < 1 || part.lane < 0 ||
       part.lane >= part.every || part.columns % part.every || rows * part.every * cols % (part.rows * part.columns) ||
       (part.transposed && (part.width < 1 || part.columns / part.every % part.width))))
    fail(Status::native, "%s takes rows [%" PRId64 ", %" PRId64 ") of %" PRId64 " of each head", name.c_str(),
         part.first, part.first + part.rows, part.stored);
  const int64_t stored_cols = part.stored ? part.columns : cols;
  const int64_t heads = part.stored ? rows * part.every * cols / (part.rows * part.columns) : 0;
  int64_t stored_rows = part.stored ? heads * part.stored : rows;
  if (is_joined()) scales.check(name.c_str(), type, stored_rows, stored_cols, places.size());
  if (scales.is_across()) stored_rows = scales.rows;
  for (const FilePlace& place : places) {
    int64_t all, end;
    if (place.offset < 0 || stored_cols > INT64_MAX / 8 ||
        __builtin_mul_overflow(stored_rows, bytes(stored_cols), &all) ||
        __builtin_add_overflow(all, place.offset, &end) || end > place.file->size())
      fail(Status::model_file,
           "%s: tensor %s does not end within the file's %" PRId64 " bytes: it is truncated or damaged",
           place.file->path().c_str(), name.c_str(), place.file->size());
  }
}

int64_t Source::bytes(int64_t columns) const {
  return is_joined() ? scales.code_bytes(columns) : bytes_of(type, columns);
}

StoredMatrix::StoredMatrix(Source source, Type packed_type, std::vector<RowRange> rows, int64_t col_begin,
                           int64_t col_end)
    : source_(std::move(source)), rows_(std::move(rows)) {
  source_.check();
  const char* name = source_.name.c_str();
  const TypeTraits& traits = type_traits(packed_type);
  const LinearKernel* kernel = traits.block_elements ? &kernels().linear[int(packed_type)] : nullptr;
  if (!kernel || !kernel->pack)
    fail(Status::native, "%s cannot be packed as type %d: it has no kernel", name, int(packed_type));
  const bool transposed = source_.part.transposed;
  if (packed_type != source_.type || transposed) {
    quantize_ =
        is_float(source_.type) || source_.is_joined() || transposed ? kernels().quantize.of(packed_type) : nullptr;
    widens_ = packed_type == Type::f32 && !transposed && is_float(source_.type);
    if (!quantize_ && !widens_ && !(transposed && packed_type == Type::f32))
      fail(Status::native, "%s of type %s cannot become %s", name, type_traits(source_.type).name, traits.name);
  }
  const int64_t block = std::max(undivided_columns(packed_type), transposed ? 1 : undivided_columns(source_.type));
  if (col_begin < 0 || col_begin > col_end || col_end > source_.cols || col_begin % block ||
      (col_end % block && col_end != source_.cols))
    fail(Status::native,
         "columns [%" PRId64 ", %" PRId64 ") of %s are not whole blocks of %" PRId64 " among its %" PRId64, col_begin,
         col_end, name, block, source_.cols);
  for (const RowRange& range : rows_) {
    if (range.begin < 0 || range.begin > range.end || range.end > source_.rows)
      fail(Status::native, "rows [%" PRId64 ", %" PRId64 ") of %s are not among its %" PRId64, range.begin, range.end,
           name, source_.rows);
    rows_each_ += range.end - range.begin;
  }
  row_bytes_ = source_.bytes(source_.part.stored ? source_.part.columns : source_.cols);
  segment_begin_ = transposed ? 0 : source_.bytes(col_begin);
  segment_bytes_ =
      transposed ? ((col_end - col_begin) * source_.bytes(256) + 255) / 256 : source_.bytes(col_end - col_begin);
  col_begin_ = col_begin;
  pack_ = kernel->pack;
  tile_bytes_ = kernel->tile_bytes;
  const int64_t padded = count() > 1 ? tiles_each() * kTileRows : rows_each_;
  shape_ = {packed_type, count() * padded, col_end - col_begin, 0, nullptr};
  if (shape_.rows && shape_.cols) shape_.tile_bytes = kernel->tile_bytes(shape_.cols);
}

int64_t StoredMatrix::stored_row(int64_t row) const {
  auto range = rows_.begin();
  for (; row >= range->end - range->begin; ++range) row -= range->end - range->begin;
  row += range->begin;
  const HeadPart& part = source_.part;
  if (!part.stored) return interleaved(row, source_.head_rows);
  if (part.transposed) return (row / part.width * part.every + part.lane) * part.width + row % part.width;
  return row / part.rows * part.stored + part.first + row % part.rows;
}

// Rows [row, row + count) of a part that is transposed, in float32: (count, cols).
void StoredMatrix::gather(int64_t matrix, int64_t row, int count, float* out) const {
  const HeadPart& part = source_.part;
  const int64_t cols = shape_.cols;
  const TypeTraits& traits = type_traits(source_.type);
  const LinearKernel& kernel = kernels().linear[int(source_.type)];
  alignas(64) uint8_t tile[kColumnPad * kTileRows * sizeof(float) * 2];
  float block[kColumnPad];
  const int64_t step = part.width > 1 ? 1 : part.every;
  for (int i = 0, n; i < count; i += n) {  // rows of one head whose elements lie in the same blocks
    const int64_t at = stored_row(row + i), head = at / part.columns, column = at % part.columns;
    const int64_t begin = column / traits.block_elements * traits.block_elements;
    const int64_t size = std::min<int64_t>(std::max(traits.block_elements, kTileRows), part.columns - begin);
    n = 1;
    while (i + n < count && stored_row(row + i + n) == at + n * step && column + n * step < begin + size) n++;
    const int64_t span = (n - 1) * step + 1;
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t stored_at = head * part.stored + part.first + col_begin_ + j;
      const uint8_t* const stored = source_.places[matrix].data() + stored_at * row_bytes_ + source_.bytes(begin);
      if (source_.is_joined()) {
        join(matrix, stored_at, begin, size, tile);
        dequantize_row_of(source_.type)(tile, size, block);
        std::memmove(block, block + column - begin, span * sizeof(float));
      } else if (is_float(source_.type)) {
        to_float(source_.type, stored + bytes_of(source_.type, column - begin), span, block);
      } else {
        kernel.pack(&stored, 1, size, tile);
        kernel.unpack_row(tile, 0, size, block);
        std::memmove(block, block + column - begin, span * sizeof(float));
      }
      for (int k = 0; k < n; ++k) out[(i + k) * cols + j] = block[k * step];
    }
  }
}

void StoredMatrix::pack(int64_t begin, int64_t end, uint8_t* out, Rows* scratch) const {
  const int64_t packed_row_bytes = bytes_of(shape_.type, shape_.cols);
  const bool transposed = source_.part.transposed;
  Rows own;
  const bool whole = transposed || widens_;  // tiles are packed from floats
  if (whole && !scratch) scratch = &own;
  if (quantize_ || whole) {
    scratch->floats.resize((whole ? kTileRows : 1) * shape_.cols);
    scratch->quantized.resize(kTileRows * packed_row_bytes);
  }
  for (int64_t tile = begin; tile < end; ++tile, out += shape_.tile_bytes) {
    const int64_t matrix = tile / tiles_each(), first = tile % tiles_each() * kTileRows;
    const FilePlace& place = source_.places[matrix];
    const int rows_here = int(std::min<int64_t>(kTileRows, rows_each_ - first));
    if (transposed) {
      gather(matrix, first, rows_here, scratch->floats.data());
    } else if (source_.is_joined() && !quantize_) {
      pack_joined(matrix, first, rows_here, out);
      continue;
    }
    const uint8_t* rows[kTileRows];
    for (int i = 0; i < rows_here; ++i) {
      const float* floats = scratch ? scratch->floats.data() : nullptr;
      if (widens_) read_floats(matrix, first + i, scratch->floats.data() + i * shape_.cols);
      if (whole) {
        floats += i * shape_.cols;
        rows[i] = reinterpret_cast<const uint8_t*>(floats);
      } else {
        rows[i] = row_at(place, first + i);
      }
      if (!quantize_) continue;
      if (!transposed) read_floats(matrix, first + i, scratch->floats.data());
      uint8_t* const row = scratch->quantized.data() + i * packed_row_bytes;
      if (!quantize_(floats, shape_.cols, row))
        fail(Status::model_file,
             "%s: tensor %s has a value in stored row %" PRId64 " that is not finite or too large for %s",
             place.file->path().c_str(), source_.name.c_str(), stored_row(first + i), type_traits(shape_.type).name);
      rows[i] = row;
    }
    pack_(rows, rows_here, shape_.cols, out);
  }
}

void StoredMatrix::join(int64_t matrix, int64_t stored, int64_t col, int64_t cols, uint8_t* out) const {
  const FilePlace& place = source_.places[matrix];
  const Scales& scales = source_.scales;
  const int64_t code_at = source_.bytes(col);
  if (!join_row(scales, source_.type, matrix, stored, col, cols,
                place.data() + (scales.is_across() ? 0 : stored * row_bytes_ + (scales.order.empty() ? code_at : 0)),
                out))
    place.file->reject(place.file->path() + ": tensor " + source_.name + " has a code or a scale in row " +
                       std::to_string(stored) + " that is no finite number, or has a zero point or bits that " +
                       type_traits(source_.type).name + " does not keep: it is damaged");
}

void StoredMatrix::pack_joined(int64_t matrix, int64_t first, int count, uint8_t* out) const {
  uint8_t blocks[kTileRows][kJoinedColumns / kGroupColumns * kJoinedBlockBytes];
  const uint8_t* rows[kTileRows];
  for (int64_t col = 0; col < shape_.cols; col += kJoinedColumns) {
    const int64_t cols = std::min<int64_t>(kJoinedColumns, shape_.cols - col);
    for (int i = 0; i < count; ++i) {
      join(matrix, stored_row(first + i), col_begin_ + col, cols, blocks[i]);
      rows[i] = blocks[i];
    }
    pack_(rows, count, cols, out + tile_bytes_(col));
  }
}

void StoredMatrix::read_floats(int64_t matrix, int64_t row, float* out) const {
  if (!source_.is_joined()) return to_float(source_.type, row_at(source_.places[matrix], row), shape_.cols, out);
  uint8_t blocks[kJoinedColumns / kGroupColumns * kJoinedBlockBytes];
  const DequantizeRow values = dequantize_row_of(source_.type);
  for (int64_t col = 0; col < shape_.cols; col += kJoinedColumns) {
    const int64_t cols = std::min<int64_t>(kJoinedColumns, shape_.cols - col);
    join(matrix, stored_row(row), col_begin_ + col, cols, blocks);
    values(blocks, cols, out + col);
  }
}

void StoredMatrix::pack_row(int64_t row, uint8_t* out) const {
  const int64_t matrix = row / rows_each_;
  row %= rows_each_;
  if (source_.is_joined() && !quantize_) return pack_joined(matrix, row, 1, out);
  const uint8_t* const rows[] = {row_at(source_.places[size_t(matrix)], row)};
  pack_(rows, 1, shape_.cols, out);
}

void StoredMatrix::will_need_row(int64_t row) const {
  if (source_.scales.is_across()) return;  // the row is spread over the whole tensor
  const FilePlace& place = source_.places[size_t(row / rows_each_)];
  place.file->will_need(place.offset + stored_row(row % rows_each_) * row_bytes_ + segment_begin_, segment_bytes_);
}

void StoredMatrix::check_files() const {
  const MappedFile* last = nullptr;  // places of one file usually follow one another
  for (const FilePlace& place : source_.places) {
    if (place.file != last) place.file->check();
    last = place.file;
  }
}

void StoredMatrix::will_need(int64_t begin, int64_t end) const {
  const HeadPart& part = source_.part;
  for (int64_t tile = begin, next; tile < end; tile = next) {  // up to the end of a matrix at a time
    const int64_t matrix = tile / tiles_each(), before = matrix * tiles_each();
    next = std::min(end, before + tiles_each());
    const int64_t last = std::min((next - before) * kTileRows, rows_each_);
    int64_t low = INT64_MAX, high = 0;
    for (int64_t row = (tile - before) * kTileRows; row < last; ++row) {
      int64_t stored = stored_row(row), more = 0;
      if (part.transposed)
        stored = stored / part.columns * part.stored + part.first + col_begin_, more = shape_.cols - 1;
      low = std::min(low, stored), high = std::max(high, stored + more);
    }
    const FilePlace& place = source_.places[matrix];
    if (source_.scales.is_across()) {  // the first tile needs every page
      if (tile == before) place.file->will_need(place.offset, source_.scales.rows * row_bytes_);
    } else if (low <= high)
      place.file->will_need(place.offset + low * row_bytes_ + segment_begin_,
                            (high - low) * row_bytes_ + (part.transposed ? row_bytes_ : segment_bytes_));
  }
}

void StoredVector::check() const {
  source.check();
  if (!is_float(source.type) || source.cols != 1)
    fail(Status::native, "vector %s has type %s; it must be F32, F16 or BF16", source.name.c_str(),
         type_traits(source.type).name);
  if (begin < 0 || begin > end || end > source.rows)
    fail(Status::native, "elements [%" PRId64 ", %" PRId64 ") of %s are not among its %" PRId64, begin, end,
         source.name.c_str(), source.rows);
}

int64_t StoredVector::stored_bytes() const { return bytes_of(source.type, end - begin); }

void StoredVector::read(float* out) const {
  const int64_t item = bytes_of(source.type, 1);
  for (int64_t i = begin; i < end; ++i, ++out) {
    const int64_t at =
        source.part.stored ? i * source.part.stored + source.part.first : interleaved(i, source.head_rows);
    to_float(source.type, source.file().data() + source.offset() + at * item, 1, out);
    if (plus_one) *out += 1.0f;
    *out *= factor;
    if (exp_sign == 0) continue;
    if (!(*out * float(exp_sign) > 0))
      fail(Status::model_file, "%s: tensor %s has %g; all of it must be %s 0", source.file().path().c_str(),
           source.name.c_str(), double{*out}, exp_sign > 0 ? "above" : "below");
    *out = std::log(*out * float(exp_sign));
  }
}

}  // namespace ckdist
