#include "runtime/joined_rows.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "core/error.h"
#include "kernels/half.h"

namespace ckdist {
namespace {

constexpr int kColumns = 32;  // columns of a block of every type here
constexpr uint32_t kSymmetric = 8;

constexpr int kFloat8Group = 16;  // columns that share a float8 scale
constexpr int kFloat8Begin = 6;   // bytes of a block before its codes

int scale_bytes(ScaleForm form) {
  return form == ScaleForm::f32 ? 4 : form == ScaleForm::exponent || form == ScaleForm::e4m3 ? 1 : 2;
}

// Converts 16 bytes of neighbouring pairs (32 columns) to the layout of blocks: columns 16 to 31 in the upper nibbles.
void copy_nibbles(const uint8_t* pairs, uint8_t* out) {
  for (int i = 0; i < 8; ++i) {
    const uint8_t first = pairs[i], second = pairs[i + 8];
    out[2 * i] = uint8_t((first & 0x0f) | second << 4);
    out[2 * i + 1] = uint8_t(first >> 4 | (second & 0xf0));
  }
}

// True if one of 32 float8 codes is a NaN: all bits except the sign are 1.
bool has_nan(const uint8_t* codes) {
  bool found = false;  // all codes are read, so that compilers use vectors
  for (int i = 0; i < kColumns; ++i) found |= (codes[i] & 0x7f) == 0x7f;
  return found;
}

struct Scale {
  uint32_t stored, single;  // bits in the file, and bits of the float32
};

Scale read_scale(ScaleForm form, const uint8_t* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, size_t(scale_bytes(form)));
  switch (form) {
    case ScaleForm::f32: return {bits, bits};
    case ScaleForm::f16: return {bits, bits_of_float(float_of_half(uint16_t(bits)))};
    case ScaleForm::bf16: return {bits, bits << 16};
    case ScaleForm::exponent: return {bits, bits == 0xff ? 0x7fc00000u : bits ? bits << 23 : 2 * kLeastPower};
    default: return {bits, 0};
  }
}

bool finite(uint32_t single) { return (single & 0x7f800000u) != 0x7f800000u; }

// Writes the factor and the two scales of a block of nvfp4. Returns false if a scale is negative or NaN.
bool store_float8(float factor, const uint8_t* scales, uint8_t* out) {
  factor *= 0x1p116f;  // 2^117, and half of it because the code book has twice the values
  std::memcpy(out, &factor, sizeof factor);
  out[4] = scale_of_e4m3(scales[0]), out[5] = scale_of_e4m3(scales[1]);
  return scales[0] < 0x7f && scales[1] < 0x7f;
}

// Writes the scale of a block. Returns the offset of the block's codes.
int store_scale(Type type, Scale scale, uint32_t zero, uint8_t* out) {
  const uint32_t word = is_float8(type) ? scale.single : scale.single | zero;
  const int bytes = type == Type::mxfp4 ? 1 : type == Type::q4_0 || type == Type::int4_32 ? 2 : 4;
  std::memcpy(out, bytes == 4 ? &word : &scale.stored, size_t(bytes));
  return bytes;
}

bool makes(Type type, CodeForm codes, ScaleForm form, bool zeros) {
  if (codes == CodeForm::columns || codes == CodeForm::rows) {
    codes = CodeForm::nibbles;
    if (type == Type::q4_0 || type == Type::int4_32) zeros = false;  // join_row compares them with kSymmetric
  }
  switch (type) {
    case Type::f8_e4m3:
    case Type::f8_e4m3_32: return codes == CodeForm::bytes && form != ScaleForm::e4m3 && !zeros;
    case Type::mxfp4: return codes == CodeForm::nibbles && form == ScaleForm::exponent && !zeros;
    case Type::q4_0: return codes == CodeForm::nibbles && form == ScaleForm::f16 && !zeros;
    case Type::int4_32: return codes == CodeForm::nibbles && form == ScaleForm::bf16 && !zeros;
    case Type::int4_32z:
    case Type::int4_128z: return codes == CodeForm::nibbles && form < ScaleForm::exponent;
    case Type::nvfp4: return codes == CodeForm::nibbles && form == ScaleForm::e4m3 && !zeros;
    default: return false;
  }
}

// The codes of 32 columns of a row, whose tensor has words across `rows` rows, as 16 bytes of neighbouring pairs.
void gather_pairs(CodeForm form, const uint8_t* tensor, int64_t rows, int64_t row, int64_t col, uint8_t* pairs) {
  if (form == CodeForm::columns) {
    for (int i = 0; i < kColumns / 8; ++i) std::memcpy(pairs + 4 * i, tensor + 4 * ((col / 8 + i) * rows + row), 4);
    return;
  }
  const int shift = kRowWordShifts[row % 8] & 7;
  const uint8_t* byte = tensor + (col * rows / 8 + row / 8) * 4 + kRowWordShifts[row % 8] / 8;
  for (int i = 0; i < kColumns / 2; ++i, byte += rows) {
    const int first = byte[0] >> shift & 0x0f, second = byte[rows / 2] >> shift & 0x0f;
    pairs[i] = uint8_t(first | second << 4);
  }
}

// The same for 32 stored columns at `columns` of a row. `codes`: as those of join_row.
void gather_ordered(const Scales& s, const uint8_t* codes, int64_t row, const int32_t* columns, uint8_t* pairs) {
  const auto code = [&](int64_t column) {
    const int64_t byte = s.codes == CodeForm::columns ? 4 * (column / 8 * s.rows + row) + column % 8 / 2 : column / 2;
    return codes[byte] >> (4 * (column % 2)) & 0x0f;
  };
  for (int i = 0; i < kColumns / 2; ++i) pairs[i] = uint8_t(code(columns[2 * i]) | code(columns[2 * i + 1]) << 4);
}

void check_within(const char* name, const FilePlace& place, int64_t bytes) {
  if (place.offset < 0 || bytes > place.file->size() || place.offset > place.file->size() - bytes)
    fail(Status::model_file,
         "%s: the scales of %s do not end within the file's %" PRId64 " bytes: it is truncated or damaged",
         place.file->path().c_str(), name, place.file->size());
}

}  // namespace

void Scales::check(const char* name, Type type, int64_t matrix_rows, int64_t matrix_cols, size_t matrices) const {
  constexpr int64_t most = int64_t{1} << 40;
  if (!makes(type, codes, form, !zeros.empty()))
    fail(Status::native, "the codes and scales of %s do not make %s", name, type_traits(type).name);
  const int64_t alike = form == ScaleForm::e4m3 ? kFloat8Group : undivided_columns(type);
  if (form == ScaleForm::e4m3) {
    if (cols_each != kFloat8Group || factors.size() != matrices)
      fail(Status::native, "%s has %zu factors and scales of %" PRId64 " columns", name, factors.size(), cols_each);
    for (const float factor : factors)
      if (!(factor > 0 && factor < 256)) fail(Status::native, "%s has the factor %g", name, double{factor});
  }
  if (rows_each < 1 || cols_each < 1 || cols_each % alike || rows < 0 || cols < 0 || rows > most || cols > most ||
      first_row < 0 || first_row > most)
    fail(Status::native, "%s has a scale for %" PRId64 " rows and %" PRId64 " columns; columns come in %" PRId64, name,
         rows_each, cols_each, alike);
  if ((first_row + matrix_rows - 1) / rows_each >= rows || (matrix_cols - 1) / cols_each >= cols ||
      (rows && cols > most / rows))
    fail(Status::native, "%s of %" PRId64 " x %" PRId64 " cannot have %" PRId64 " x %" PRId64 " scales", name,
         matrix_rows, matrix_cols, rows, cols);
  if (places.size() != matrices || (!zeros.empty() && zeros.size() != matrices))
    fail(Status::native, "%s has %zu matrices and %zu tensors of scales", name, matrices, places.size());
  const auto outside = [&](int32_t column) { return column < 0 || column >= matrix_cols; };
  if (!order.empty() &&
      (codes == CodeForm::bytes || codes == CodeForm::rows || form == ScaleForm::e4m3 || matrices != 1 ||
       int64_t(order.size()) != matrix_cols || std::any_of(order.begin(), order.end(), outside)))
    fail(Status::native, "%s cannot have %zu columns in an order of their own", name, order.size());
  if (is_across() && (rows % 8 || rows_each != 1))
    fail(Status::native, "%s has words across %" PRId64 " rows, which are no multiple of 8", name, rows);
  for (const FilePlace& place : places) check_within(name, place, rows * cols * scale_bytes(form));
  for (const FilePlace& place : zeros) check_within(name, place, (rows + 7) / 8 * cols * 4);
}

bool join_row(const Scales& scales, Type type, int64_t matrix, int64_t row, int64_t col, int64_t cols,
              const uint8_t* codes, uint8_t* out) {
  const bool across = scales.is_across();
  const int64_t of_rows = (scales.first_row + row) / scales.rows_each;
  // A scale's index is of_rows * row_step + its column * column_step; a word of zero points has eight rows.
  const int64_t row_step = across ? 1 : scales.cols, column_step = across ? scales.rows : 1;
  const int64_t zero_at = of_rows / 8 * row_step, zero_step = across ? scales.rows / 8 : 1;
  const int zero_shift = (scales.codes == CodeForm::rows ? kRowWordShifts : kWordShifts)[of_rows % 8];
  const uint8_t* const stored = scales.places[matrix].data();
  const uint8_t* const zeros = scales.zeros.empty() ? nullptr : scales.zeros[matrix].data();
  const bool zeroed = type == Type::int4_32z || type == Type::int4_128z;
  bool good = true;
  for (int64_t c = col; c < col + cols; c += kColumns, out += type_traits(type).block_bytes) {
    if (scales.form == ScaleForm::e4m3) {
      good &= store_float8(scales.factors[matrix], stored + of_rows * row_step + c / kFloat8Group, out);
      copy_nibbles(codes, out + kFloat8Begin);
      codes += kColumns / 2;
      continue;
    }
    const int64_t of_cols = c / scales.cols_each;
    const Scale scale =
        read_scale(scales.form, stored + (of_rows * row_step + of_cols * column_step) * scale_bytes(scales.form));
    uint32_t zero = kSymmetric;
    if (zeros) {
      std::memcpy(&zero, zeros + 4 * (zero_at + of_cols * zero_step), sizeof zero);
      zero = (zero + scales.zero_added) >> zero_shift & kZeroPoint;
    }
    good = good && finite(scale.single) && (zeroed ? !(scale.single & kZeroPoint) : zero == kSymmetric);
    const int begin = store_scale(type, scale, zero, out);
    if (scales.codes == CodeForm::bytes) {
      good = good && !has_nan(codes);
      std::memcpy(out + begin, codes, kColumns);
      codes += kColumns;
    } else if (across || !scales.order.empty()) {
      uint8_t pairs[kColumns / 2];
      if (scales.order.empty()) gather_pairs(scales.codes, codes, scales.rows, of_rows, c, pairs);
      else gather_ordered(scales, codes, of_rows, scales.order.data() + c, pairs);
      copy_nibbles(pairs, out + begin);
    } else {
      copy_nibbles(codes, out + begin);
      codes += kColumns / 2;
    }
  }
  return good;
}

}  // namespace ckdist
