// State of the model of tiles, and C functions for its tests.
#include <algorithm>
#include <vector>

#include "api/export.h"
#include "kernels/isa/tile.h"
#include "kernels/kernels.h"

namespace ckdist {
TileCounts tile_counts;
thread_local TileModel tile_model;
}  // namespace ckdist

using namespace ckdist;

// Operations of all threads since the start: loads, stores, products, rows of sums in products.
CKDIST_EXPORT void tile_operations(int64_t* out) {
  out[0] = tile_counts.loads, out[1] = tile_counts.stores;
  out[2] = tile_counts.products, out[3] = tile_counts.rows;
}

// Whether this thread's tiles are configured.
CKDIST_EXPORT int tiles_are_live() { return tile_model.configured; }

// ckdist_multiply with the kernel of prompts. If `up` is not null: y = SiLU(the product) * (the product with the tiles
// at up).
CKDIST_EXPORT void tile_multiply_prompt(int type, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t begin,
                                        int64_t end, const uint8_t* x, int64_t x_stride, int strips, int64_t tokens,
                                        float* y, const uint8_t* up) {
  static std::vector<uint8_t> room(kPromptBytes + 64);
  const LinearKernel& kernel = kernels_named("amx").linear[type];
  const Matrix matrix{static_cast<Type>(type), rows, cols, kernel.tile_bytes(cols), tiles};
  kernel.multiply_prompt({matrix, begin, end, x, x_stride, strips != 0, tokens, y, rows,
                          room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63), up, GateFunction::silu,
                          kernels_named("amx").elementwise.gated});
}

// ProductKernel::multiply. y: (tokens, rows).
CKDIST_EXPORT void tile_multiply_rows(int64_t rows, int64_t cols, const uint8_t* tiles, const uint8_t* x,
                                      int64_t x_stride, int64_t tokens, float* y) {
  const Matrix matrix{Type::bf16, rows, cols, (cols + 15) / 16 * 512, tiles};
  kernels_named("amx").product.bf16.multiply(matrix, 0, matrix.tile_count(), x, x_stride, tokens, y, rows, false);
}

// StripKernel::produce. out: (tokens, whole tiles of rows).
CKDIST_EXPORT void tile_produce(int64_t rows, int64_t cols, const uint8_t* tiles, const uint8_t* x, int64_t x_stride,
                                int64_t tokens, const float* bias, const float* residual, int narrow, uint8_t* out) {
  const StripKernel& kernel = *kernels_named("amx").product.bf16.strips;
  const int64_t tile_bytes = (cols + 15) / 16 * 512, width = (rows + 15) / 16 * 16;
  constexpr int64_t rows_at_once = kStripsTiles * 16;
  std::vector<float> sums(kStripsSums + 16);
  std::vector<uint8_t> packed((tokens + kStripRows) * strip_bytes(cols) / kStripRows + 64);
  const auto aligned = [](auto& v) { return v.data() + (-reinterpret_cast<uintptr_t>(v.data()) & 63) / sizeof v[0]; };
  for (int64_t t = 0; t < tokens; t += kStripRows)
    kernel.pack_rows(x + t * x_stride, x_stride, std::min(kStripRows, tokens - t), cols,
                     aligned(packed) + t / kStripRows * strip_bytes(cols));
  for (int64_t t = 0; t < tokens; t += kStripsTokens)
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      const Matrix part{Type::bf16, std::min(rows_at_once, rows - row), cols, tile_bytes,
                        tiles + row / 16 * tile_bytes};
      const int64_t element = narrow ? 2 : 4;
      kernel.produce(part, aligned(packed) + t / kStripRows * strip_bytes(cols), std::min(kStripsTokens, tokens - t),
                     part.tiles, aligned(sums),
                     {out + (t * width + row) * element, width * element, narrow != 0, bias + row,
                      residual + t * rows + row, rows});
    }
}

// y (rows, columns) (+)= dy^T x for dy (tokens, rows) and x (tokens, columns), by ProductKernel::outer or, with
// `strips`, StripKernel::outer. Rows are 64 bytes longer, and whole vectors are read.
CKDIST_EXPORT void tile_outer(int strips, int64_t tokens, int64_t rows, int64_t columns, const uint8_t* dy,
                              const uint8_t* x, float* y, int add) {
  const Kernels& kernels = kernels_named("amx");
  const ProductKernel& kernel = kernels.product.bf16;
  const int64_t dy_stride = (rows + 32) * 2, x_stride = (columns + 32) * 2, tile_bytes = (tokens + 15) / 16 * 512;
  const auto pack = [&](const uint8_t* from, int64_t stride, int64_t width, std::vector<uint8_t>& to) {
    to.resize((width + 15) / 16 * tile_bytes);
    for (int64_t at = 0; at < width; at += 16)
      kernels.pack.bf16.operand_columns(from + at * 2, stride, int(std::min<int64_t>(16, width - at)), tokens,
                                        to.data() + at / 16 * tile_bytes, tile_bytes);
  };
  std::vector<uint8_t> tiles, dy_tiles, packed((rows + kStripRows) / kStripRows * strip_bytes(tokens) + 64);
  pack(x, x_stride, columns, tiles), pack(dy, dy_stride, rows, dy_tiles);
  const Matrix matrix{Type::bf16, columns, tokens, tile_bytes, tiles.data()};
  if (!strips) {
    for (int64_t first = 0; first < tokens; first += kOuterColumns) {
      Matrix some = matrix;
      some.cols = std::min(kOuterColumns, tokens - first), some.tiles += first * 32;
      kernel.outer(some, 0, some.tile_count(), dy_tiles.data() + first * 32, tile_bytes, rows, y, columns,
                   add || first > 0, nullptr);
    }
    return;
  }
  std::vector<float> sums(kStripsSums + 16);
  uint8_t* const at = packed.data() + (-reinterpret_cast<uintptr_t>(packed.data()) & 63);
  float* const scratch = sums.data() + (-reinterpret_cast<uintptr_t>(sums.data()) & 63) / 4;
  for (int64_t row = 0; row < rows; row += kStripRows)
    kernel.strips->pack_columns(dy + row * 2, dy_stride, tokens, std::min(kStripRows, rows - row),
                                at + row / kStripRows * strip_bytes(tokens));
  for (int64_t column = 0; column < columns; column += kStripsTiles * 16) {
    Matrix some = matrix;
    some.rows = std::min(kStripsTiles * 16, columns - column), some.tiles += column / 16 * tile_bytes;
    kernel.strips->outer(some, at, rows, nullptr, scratch, y + column, columns, add != 0);
  }
}

CKDIST_EXPORT int64_t tile_peak(int format, int64_t rounds) {
  uint64_t sink = 0;
  return kernels_named("amx").machine.multiply_add(static_cast<ActivationFormat>(format), rounds, &sink);
}
