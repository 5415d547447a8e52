#include "api/kernels_api.h"
#include "bindings/isa_choice.h"
#include "core/dtype.h"
#include "core/error.h"
#include "kernels/formats.h"
#include "kernels/layout_blocks.h"

namespace ckdist {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 30;  // the product of two of them, in bytes, fits an int64

void check_dimension(const char* name, int64_t value) {
  if (value < 0 || value > kMaxDimension)
    fail(Status::native, "%s (%lld) is outside 0 to %lld", name, static_cast<long long>(value),
         static_cast<long long>(kMaxDimension));
}

void check_bytes(const char* name, int64_t given, int64_t needed) {
  if (given != needed)
    fail(Status::native, "%s has %lld bytes, needs %lld", name, static_cast<long long>(given),
         static_cast<long long>(needed));
}

const TypeTraits& checked_type(int32_t type, int64_t rows, int64_t cols) {
  const TypeTraits& traits = type_traits(type);
  if (traits.block_elements == 0) fail(Status::native, "weight type %d is not known", type);
  check_dimension("rows", rows);
  check_dimension("cols", cols);
  if (cols % traits.block_elements)
    fail(Status::native, "cols (%lld) must be a multiple of %s's block of %d", static_cast<long long>(cols),
         traits.name, traits.block_elements);
  return traits;
}

const LinearKernel& checked_kernel(const char* isa, int32_t type, int64_t rows, int64_t cols) {
  checked_type(type, rows, cols);
  return kernels_by_name(isa).linear[type];
}

int64_t row_bytes(int32_t type, int64_t cols) {
  const TypeTraits& traits = type_traits(type);
  return cols / traits.block_elements * traits.block_bytes;
}

std::string level_names() {
  std::string names;
  for (const LevelFormats& level : kLevelFormats) names += (names.empty() ? "" : ", ") + std::string(level.name);
  return names;
}

ActivationFormat checked_format(int32_t format) {
  if (format < 0 || format > static_cast<int32_t>(ActivationFormat::q8))
    fail(Status::native, "activation format %d is not 0, 1 or 2", format);
  return static_cast<ActivationFormat>(format);
}

Matrix checked_matrix(const LinearKernel& kernel, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                      int64_t tiles_bytes) {
  const Matrix matrix = {static_cast<Type>(type), rows, cols, kernel.tile_bytes(cols), tiles};
  check_bytes("tiles", tiles_bytes, matrix.tile_count() * matrix.tile_bytes);
  return matrix;
}

// The format that a level's `format` names for a type, or the error status.
int format_of(const char* isa, int32_t type, ActivationFormat (*format)(const LevelFormats&, Type)) {
  return guard_value([&] {
    checked_type(type, 0, 0);
    const LevelFormats* level = level_formats(isa ? isa : kernels().name);
    if (!level) fail(Status::config, "ISA %.32s is not known; use one of %s", isa, level_names().c_str());
    return static_cast<int>(format(*level, static_cast<Type>(type)));
  });
}

}  // namespace
}  // namespace ckdist

using namespace ckdist;

int64_t ckdist_tile_bytes(const char* isa, int32_t type, int64_t cols) {
  return guard_value([&] { return checked_kernel(isa, type, 0, cols).tile_bytes(cols); });
}

int ckdist_pack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* source, int64_t source_bytes,
                uint8_t* tiles, int64_t tiles_bytes) {
  return guard([&] {
    const LinearKernel& kernel = checked_kernel(isa, type, rows, cols);
    const Matrix matrix = checked_matrix(kernel, type, rows, cols, tiles, tiles_bytes);
    const int64_t stride = row_bytes(type, cols);
    check_bytes("source", source_bytes, rows * stride);
    for (int64_t tile = 0; tile < matrix.tile_count(); ++tile) {
      const uint8_t* source_rows[kTileRows];
      int count = 0;
      for (; count < kTileRows && tile * kTileRows + count < rows; ++count)
        source_rows[count] = source + (tile * kTileRows + count) * stride;
      kernel.pack(source_rows, count, cols, tiles + tile * matrix.tile_bytes);
    }
  });
}

int ckdist_unpack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t tiles_bytes,
                  float* out) {
  return guard([&] {
    const LinearKernel& kernel = checked_kernel(isa, type, rows, cols);
    const Matrix matrix = checked_matrix(kernel, type, rows, cols, tiles, tiles_bytes);
    for (int64_t row = 0; row < rows; ++row)
      kernel.unpack_row(tiles + row / kTileRows * matrix.tile_bytes, static_cast<int>(row % kTileRows), cols,
                        out + row * cols);
  });
}

int ckdist_activation_format(const char* isa, int32_t type) { return format_of(isa, type, activation_format); }
int ckdist_prompt_format(const char* isa, int32_t type) { return format_of(isa, type, prompt_format); }

int64_t ckdist_activation_bytes(int32_t format, int64_t cols) {
  return guard_value([&] {
    check_dimension("cols", cols);
    return ActivationRow::bytes(checked_format(format), cols);
  });
}

int ckdist_prepare(const char* isa, int32_t format, const float* x, int64_t tokens, int64_t n, int64_t lead,
                   int64_t cols, uint8_t* out, int64_t out_bytes) {
  return guard([&] {
    const Kernels& chosen = kernels_by_name(isa);
    const ActivationFormat checked = checked_format(format);
    check_dimension("tokens", tokens);
    check_dimension("cols", cols);
    if (n < 0 || lead < 0 || n > cols || lead > cols - n)
      fail(Status::native, "columns [%lld, %lld + %lld) are not within cols (%lld)", static_cast<long long>(lead),
           static_cast<long long>(lead), static_cast<long long>(n), static_cast<long long>(cols));
    const int64_t stride = ActivationRow::bytes(checked, cols);
    check_bytes("out", out_bytes, tokens * stride);
    for (int64_t token = 0; token < tokens; ++token)
      chosen.elementwise.prepare(checked, x + token * n, n, lead, cols, out + token * stride);
  });
}

int ckdist_multiply(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                    int64_t tiles_bytes, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_bytes,
                    int64_t tokens, float* y) {
  return guard([&] {
    const LinearKernel& kernel = checked_kernel(isa, type, rows, cols);
    const Matrix matrix = checked_matrix(kernel, type, rows, cols, tiles, tiles_bytes);
    check_dimension("tokens", tokens);
    if (tile_begin < 0 || tile_begin > tile_end || tile_end > matrix.tile_count())
      fail(Status::native, "tiles [%lld, %lld) are not within the matrix's %lld", static_cast<long long>(tile_begin),
           static_cast<long long>(tile_end), static_cast<long long>(matrix.tile_count()));
    const int64_t stride = ActivationRow::bytes(kernel.activation, cols);
    check_bytes("x", x_bytes, tokens * stride);
    kernel.multiply(matrix, tile_begin, tile_end, x, stride, tokens, y, rows);
  });
}

int ckdist_quantize(const char* isa, int32_t type, int64_t rows, int64_t cols, const float* x, uint8_t* out,
                    int64_t out_bytes) {
  return guard([&] {
    const TypeTraits& traits = checked_type(type, rows, cols);
    const QuantizeRow quantize = kernels_by_name(isa).quantize.of(static_cast<Type>(type));
    if (!quantize) fail(Status::native, "no quantiser for %s; use F16, BF16, Q8_0 or Q4_K", traits.name);
    const int64_t stride = row_bytes(type, cols);
    check_bytes("out", out_bytes, rows * stride);
    for (int64_t row = 0; row < rows; ++row)
      if (!quantize(x + row * cols, cols, out + row * stride))
        fail(Status::model_file,
             "row %lld has a value that %s cannot hold (infinite, NaN or too large); load without --quantize",
             static_cast<long long>(row), traits.name);
  });
}

int ckdist_dequantize(int32_t type, int64_t rows, int64_t cols, const uint8_t* source, int64_t source_bytes,
                      float* out) {
  return guard([&] {
    checked_type(type, rows, cols);
    const int64_t stride = row_bytes(type, cols);
    check_bytes("source", source_bytes, rows * stride);
    const DequantizeRow dequantize = dequantize_row_of(static_cast<Type>(type));
    for (int64_t row = 0; row < rows; ++row) dequantize(source + row * stride, cols, out + row * cols);
  });
}
