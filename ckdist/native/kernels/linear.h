// Matrix products with packed weights: the packed layout, the activation formats, and the functions of a kernel.
//
// The packed layout is the same for every ISA. A tile interleaves kTileRows = 16 output rows over all columns. Codes
// are stored as [column / 4][16 rows][4 columns] (bf16: [column / 2][16][2]; f32 and f16: [column][16]). So one 64-byte
// load gives sixteen output lanes, no product needs a horizontal sum, and AMX can read the same bytes as a B tile.
// Low-bit codes keep their bit width (planes of 4, 2 and 1 bits); scales and minima are separate. Columns are padded to
// the type's block, rows to the tile; padding has weight zero. The packed size is at most a few per cent larger than
// the file's.
//
// Every product is batch-invariant: an output element is one sequential sum over the columns in a fixed order, for any
// number of tokens in the call. So a token's logits do not depend on the other sequences of its batch.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace ckdist {

constexpr int kTileRows = 16;
constexpr int kColumnPad = 256;  // columns of activations are padded to this with zeros

// Prompts in tiles: weights, columns and tokens of a product at a time. The products keep expanded weights, and
// sums, in memory of this many bytes.
constexpr int64_t kPromptTiles = 16, kPromptColumns = 512, kPromptTokens = 512;
// Up to this number of activations (1 MB), those of kPromptTokens tokens stay in the L2 cache for all tiles, and sums
// do not wait. Then this is the number of tiles at a time, for at most this number of columns.
constexpr int64_t kWholeActivations = 512 << 10, kWholeTiles = 2, kWholeColumns = 2048;
// Tiles and columns if activations are in rows, which are slow in short runs.
constexpr int64_t kRowsTiles = 8, kRowsColumns = 4096;
constexpr int64_t kPanelBytes = kRowsTiles * kTileRows * kRowsColumns * 2,
                  kPromptBytes = kPanelBytes + kPromptTokens * kPromptTiles * kTileRows * 4;

constexpr int kSums32Factor = 128, kSums16Factor = 32;

enum class ActivationFormat : int32_t { f32 = 0, bf16 = 1, q8 = 2 };

// Minus scale * sum of codes of the eight groups of 32 columns, as scale * (256 * high + low). Minima are multiplied
// with it. In bytes this takes two additional byte products instead of one product for each minimum.
struct GroupSums {
  int8_t high[8], low[8];
  float scale;  // a power of two
};

// One token's row of activations, prepared once per layer input for all matrices that read it.
//   f32:  float[padded]
//   bf16: uint16[padded]
//   q8:   int8 codes[padded], float scale[padded / 32], int32 sum of 32 codes * -128 [padded / 32], int32 sum of 16
//   codes * -32 [padded / 16], GroupSums[padded / 256].
// Sums are multiplied by minus the offset of the codes of the most important type, so that a product can start from
// them. Other types shift them.
struct ActivationRow {
  static int64_t padded(int64_t cols) { return (cols + kColumnPad - 1) / kColumnPad * kColumnPad; }
  // Rounds up to cache lines; for bfloat16 to an odd number of them. AMX reads a column of 32 rows, and rows at a
  // distance of an even number of lines would share few sets of the L1 cache.
  static int64_t bytes(ActivationFormat format, int64_t cols) {
    const int64_t p = padded(cols);
    const int64_t n = format == ActivationFormat::f32    ? 4 * p
                      : format == ActivationFormat::bf16 ? 2 * p
                                                         : group_sums(p) + p / kColumnPad * int64_t{sizeof(GroupSums)};
    const int64_t lines = (n + 63) / 64;
    return 64 * (format == ActivationFormat::bf16 ? lines | 1 : lines);
  }
  // Rows of bfloat16 for tiles may be in strips of 16 rows: [column / 32][row][32 columns]. A strip takes the bytes of
  // 16 rows. Its columns are consecutive memory, so hardware prefetches them, and they share the sets of a cache
  // evenly.
  static constexpr int64_t kStripRows = 16, kStripColumns = 32;
  // Offset in bytes of 32 columns of a row in strips. `stride`: bytes of a row.
  static constexpr int64_t strip_offset(int64_t row, int64_t column, int64_t stride) {
    return row / kStripRows * kStripRows * stride + (column / kStripColumns * kStripRows + row % kStripRows) * 64;
  }
  // Offsets in bytes of the parts of a q8 row of p padded columns.
  static constexpr int64_t scales(int64_t p) { return p; }
  static constexpr int64_t sums32(int64_t p) { return p + p / 8; }
  static constexpr int64_t sums16(int64_t p) { return p + p / 4; }
  static constexpr int64_t group_sums(int64_t p) { return p + p / 2; }
  // Offset in bytes of a column in a row of floats. The parts of a q8 row have offsets of their own: 0.
  static constexpr int64_t offset(ActivationFormat format, int64_t column) {
    return format == ActivationFormat::q8 ? 0 : column * (format == ActivationFormat::f32 ? 4 : 2);
  }
};

// A rank's shard of one weight matrix, packed.
struct Matrix {
  Type type;
  int64_t rows;  // output rows; the last tile is padded
  // Columns of this shard, a multiple of the type's block. The activations' row has zeros outside its own range.
  int64_t cols;
  int64_t tile_bytes;
  const uint8_t* tiles;
  // If these are some columns of another matrix: the first one, a multiple of kColumnPad, and all columns of the
  // activations' row. Bytes of `tile_bytes` are then from a tile's first column to the next tile's.
  int64_t first_column = 0, row_columns = 0;

  int64_t padded() const { return ActivationRow::padded(row_columns > 0 ? row_columns : cols); }
  int64_t tile_count() const { return (rows + kTileRows - 1) / kTileRows; }
};

enum class GateFunction : int32_t;

// A product of prompts' rows by the tiles [tile_begin, tile_end): y[t * y_stride + row] = dot(matrix[row], x[t]).
struct PromptProduct {
  const Matrix& matrix;
  int64_t tile_begin, tile_end;
  const uint8_t* x;  // in LinearKernel::prompt_activation, in rows or in strips; in strips, the first row begins one
  int64_t x_stride;
  bool strips;
  int64_t tokens;
  float* y;
  int64_t y_stride;
  uint8_t* room;  // kPromptBytes
  // If not null: tiles of a matrix of the same type and shape, and y = function(matrix * x) * (up * x). x is in strips.
  const uint8_t* up = nullptr;
  GateFunction function{};
  void (*gated)(GateFunction, const float* gate, const float* up, int64_t n, float* out) = nullptr;
};

// The functions of one weight type on one ISA: a row of the table.
struct LinearKernel {
  ActivationFormat activation;

  // Bytes of one packed tile with `cols` columns.
  int64_t (*tile_bytes)(int64_t cols);

  // Packs `rows` (<= 16) source rows, each `cols` columns in the file's block format, to one tile. Missing rows become
  // zeros. Rows may be anywhere. Nothing outside them is read, so a row may end at the end of a mapping. Runs at memory
  // speed if all rows exist.
  void (*pack)(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile);

  // One row of a tile as float32, for the embedding look-up and for tests.
  void (*unpack_row)(const uint8_t* tile, int row, int64_t cols, float* out);

  // y[t * y_stride + row] = dot(matrix[row], x[t]) for the rows of tiles [tile_begin, tile_end) and tokens [0, tokens).
  // x: `tokens` rows of x_stride bytes, prepared in `activation` format for matrix.cols columns, or row_columns if they
  // are set. The function itself blocks for the caches.
  void (*multiply)(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                   int64_t tokens, float* y, int64_t y_stride);

  // The product of prompts' rows, if the level has another for them: it multiplies bfloat16, and expands other weights.
  // Null: `multiply` takes prompts, too. Weights of bfloat16 have both: `multiply` takes their rows that are not in
  // strips.
  ActivationFormat prompt_activation;
  void (*multiply_prompt)(const PromptProduct& product);
};

// Indexed by the number of the type. Functions are null if there is no kernel.
struct KernelTable {
  LinearKernel of[kTypeCount];
};

}  // namespace ckdist
