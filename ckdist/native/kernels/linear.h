// Matrix products with packed weights: the one layout, the activation formats, and what a kernel row offers.
//
// Packed layout, the same for every ISA: a tile interleaves kTileRows = 16 output rows over all columns. Codes lie as
// [column / 4][16 rows][4 columns] (bf16: [column / 2][16][2]; f32 and f16: [column][16]), so that one 64-byte load
// feeds sixteen output lanes, no product needs a horizontal sum, and AMX can read the same bytes as a B tile. Low-bit
// codes keep their bit width (planes of 4, 2 and 1 bits), scales and minima stand apart. Columns are padded to the
// type's block, rows to the tile; padding is zero weight. The size grows by no more than a few per cent over the
// file's.
//
// Every product is batch-invariant: an output element is one sequential sum over the columns in a fixed order,
// whatever the number of tokens in the call, so a token's logits do not depend on who shares its batch.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ckdist {

constexpr int kTileRows = 16;
constexpr int kColumnPad = 256;  // columns of activations are padded to this with zeros

constexpr int kSums32Factor = 128, kSums16Factor = 32;

enum class ActivationFormat : int32_t { f32 = 0, bf16 = 1, q8 = 2 };

// Minus scale * sum of codes of the eight groups of 32 columns, as scale * (256 * high + low): what minima are
// multiplied with, in bytes, so that they take two byte products more and not a product each.
struct GroupSums {
  int8_t high[8], low[8];
  float scale;  // a power of two
};

// One token's row of activations, prepared once per layer input for all matrices that read it.
//   f32:  float[padded]        bf16: uint16[padded]
//   q8:   int8 codes[padded], float scale[padded / 32], int32 sum of 32 codes * -128[padded / 32], int32 sum of 16
//   codes * -32
//         [padded / 16], GroupSums[padded / 256]. Sums are multiplied with minus the offset of the codes of the type
//         that matters most, so that a product starts from them as they stand; the others shift.
struct ActivationRow {
  static int64_t padded(int64_t cols) { return (cols + kColumnPad - 1) / kColumnPad * kColumnPad; }
  // Rounded up to cache lines; of bfloat16 to an odd number of them: AMX reads a column of 32 rows, and those an even
  // number of lines apart would share few sets of the L1 cache.
  static int64_t bytes(ActivationFormat format, int64_t cols) {
    const int64_t p = padded(cols);
    const int64_t n = format == ActivationFormat::f32    ? 4 * p
                      : format == ActivationFormat::bf16 ? 2 * p
                                                         : group_sums(p) + p / kColumnPad * int64_t{sizeof(GroupSums)};
    const int64_t lines = (n + 63) / 64;
    return 64 * (format == ActivationFormat::bf16 ? lines | 1 : lines);
  }
  // Where the parts of a q8 row of p padded columns stand, in bytes.
  static constexpr int64_t scales(int64_t p) { return p; }
  static constexpr int64_t sums32(int64_t p) { return p + p / 8; }
  static constexpr int64_t sums16(int64_t p) { return p + p / 4; }
  static constexpr int64_t group_sums(int64_t p) { return p + p / 2; }
};

// A rank's shard of one weight matrix, packed.
struct Matrix {
  Type type;
  int64_t rows;  // logical output rows; the last tile is padded
  int64_t cols;  // columns held, a multiple of the type's block (the activations' row has zeros outside its own range)
  int64_t tile_bytes;
  const uint8_t* tiles;

  int64_t tile_count() const { return (rows + kTileRows - 1) / kTileRows; }
};

// What one weight type offers on one ISA; a row of the table.
struct LinearKernel {
  ActivationFormat activation;

  // Bytes of one packed tile with `cols` columns.
  int64_t (*tile_bytes)(int64_t cols);

  // Pack `rows` (<= 16) source rows, each `cols` columns in the file's own block format, into one tile; missing rows
  // become zeros. Rows may lie anywhere; nothing but them is read, so a row may end where a mapping does. At memory
  // speed where all rows are there.
  void (*pack)(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile);

  // One row of a tile as float32, for the embedding look-up and for tests.
  void (*unpack_row)(const uint8_t* tile, int row, int64_t cols, float* out);

  // y[t * y_stride + row] = dot(matrix[row], x[t]) for the rows of tiles [tile_begin, tile_end) and tokens [0, tokens).
  // x: tokens rows of x_stride bytes, prepared in `activation` format for matrix.cols columns. Blocks for the caches
  // inside.
  void (*multiply)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                   int64_t tokens, float* y, int64_t y_stride);
};

// By the number of the type; null functions where there is no kernel.
struct KernelTable {
  LinearKernel of[kTypeCount];
};

}  // namespace ckdist
