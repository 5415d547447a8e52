// The packed layout of the block-quantised types, as one description per type, and the packing functions.
//
// A tile is a sequence of packed blocks. A packed block has 16 rows x 256 columns of a K-type, 16 rows x 64 columns of
// other types:
//   half floats [16]      the block's scale, then the scale of its minima (only K-types)
//   scales and minima     of its groups of 16 or 32 columns, [group][16]; minima of unsigned bytes are stored like
//                         codes, [group / 4][16][4]; padded to a cache line
//   for every 32 columns  the low plane, then the high plane if there is one
// This is the order in which a product reads them, so that memory is fast. Vectors are the 64 codes of 4 columns (a
// "step") of all 16 rows, [row][column]. For 8 steps
//   a plane of 8 bits has 8 vectors, vector i holds step i
//   a plane of 6 bits has 3 vectors per 4 steps, vector i holds step i in its low bits, and bits 2i and 2i + 1 of the
//     fourth step above
//   a plane of 4 bits has 4 vectors, vector i holds steps i (low nibble) and i + 4
//   a plane of 2 bits has 2 vectors, vector i holds steps 4i (lowest bits) to 4i + 3
//   a plane of 1 bit has 1 vector, whose bit i belongs to step i
// so that any 32 columns are unpacked in the same way. Types whose codes index a grid, and ternary types, are packed as
// they are stored (kernels/interleaved.h) and expanded to such a block with a plane of 8 bits, which a product reads
// from the cache. float32 and float16 tiles are [column][16], bfloat16 [column / 2][16][2], with columns padded to 16.
// 8-bit floats have a plane of 8 bits. Its words of four columns hold the first, the third, the second and the fourth
// column: so the bytes at even positions are a pair of neighbours for a product of bfloat16, and so are the bytes at
// odd positions.
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/linear.h"

namespace ckdist {

constexpr int kGroupColumns = 32;    // columns that share an activation scale
constexpr int kFloatColumnPad = 16;  // columns of tiles of float types are padded to this

enum class ScaleKind {
  half,           // a float16 per group of 32; the same for minima
  unsigned_byte,  // block scale * byte; the same for minima
  signed_byte,    // block scale * signed byte
  exponent,       // 2^(byte - 128) for every group of 32
  expanded,       // block scale, a float32, * signed byte
  nibbles,        // block scale * low nibble; minimum: block minimum scale * high nibble
  bfloat,         // a bfloat16 per group
  zeroed,         // a float32 per group; its four lowest bits are the zero point
  single,         // a float32 per group
  float8,         // block scale, a float32 * 2^116, * a code of scale_of_e4m3
};

// value = scale * (code - offset), or scale * code - minimum if `minimum` is set. With zeroed scales the minimum is
// scale * zero point.
struct BlockLayout {
  int columns;    // columns of one packed block
  int low_bits;   // bits of a code in the low plane: 8, 6, 4 or 2
  int high_bits;  // bits of a code in the high plane: 0, 1 or 2
  int group;      // columns that share a scale: 16, 32 or 128
  int offset;
  bool minimum;
  ScaleKind scales;
  // Codes index codebook_of the type. Its entries are 8-bit codes with the offset.
  bool codebook;

  // True if scales of groups are integers, which are multiplied exactly before the block's scale.
  constexpr bool whole() const {
    return scales == ScaleKind::unsigned_byte || scales == ScaleKind::signed_byte || scales == ScaleKind::expanded;
  }
  // True if each group's scale is absolute; else it is relative to the block's scale.
  constexpr bool alone() const {
    return scales == ScaleKind::half || scales == ScaleKind::exponent || scales == ScaleKind::bfloat ||
           scales == ScaleKind::zeroed || scales == ScaleKind::single;
  }
  // unit: columns that are summed before they are scaled; 32 columns share a scale of the activations. parts: units in
  // 32 columns.
  constexpr int unit() const { return group < kGroupColumns ? group : kGroupColumns; }
  constexpr int parts() const { return kGroupColumns / unit(); }
  // Index of the group scale of unit `index`.
  constexpr int scale_of(int index) const { return index * unit() / group; }
  constexpr int largest_code() const { return codebook ? 2 * offset - 1 : (1 << (low_bits + high_bits)) - 1; }
  constexpr int groups() const { return columns / group; }
  constexpr int low_bytes() const { return kGroupColumns * kTileRows * low_bits / 8; }
  constexpr int high_bytes() const { return kGroupColumns * kTileRows * high_bits / 8; }
  constexpr int plane_bytes() const { return low_bytes() + high_bytes(); }  // of 32 columns
  constexpr int group_scale_bytes() const {
    switch (scales) {
      case ScaleKind::half:
      case ScaleKind::bfloat: return 2 * kTileRows;
      case ScaleKind::zeroed:
      case ScaleKind::single: return 4 * kTileRows;
      default: return kTileRows;
    }
  }
  constexpr int all_group_scales() const { return groups() * group_scale_bytes(); }
  constexpr int block_scales() const {
    if (scales == ScaleKind::expanded || scales == ScaleKind::float8) return 4 * kTileRows;
    return alone() ? 0 : 2 * kTileRows * (minimum ? 2 : 1);
  }
  // With integer scales, sums run over the block, and its own scale and the minima are read after the codes; else
  // before them.
  constexpr int group_scales() const { return whole() ? 0 : block_scales(); }
  constexpr int head() const {
    return group_scales() + all_group_scales() * (minimum && scales == ScaleKind::half ? 2 : 1);
  }
  constexpr int planes() const { return (head() + 63) / 64 * 64; }
  constexpr int tail() const { return planes() + columns / kGroupColumns * plane_bytes(); }
  constexpr int group_minima() const {
    return scales == ScaleKind::half ? group_scales() + all_group_scales() : tail();
  }
  constexpr int block_scale() const { return whole() ? tail() + (minimum ? all_group_scales() : 0) : 0; }
  constexpr int block_minimum() const { return block_scale() + 2 * kTileRows; }
  constexpr int used() const { return whole() ? block_scale() + block_scales() : tail(); }
  constexpr int bytes() const { return (used() + 63) / 64 * 64; }
};

// IQ4's sixteen values, shifted by 128 to be unsigned; and FP4's values (E2M1) times 2, shifted by 16.
constexpr uint8_t kIq4Codebook[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFp4Codebook[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr int kCodebookOffset = 128;  // offset of IQ4, and of codes of 8 bits
constexpr const uint8_t* codebook_of(Type type) {
  return type == Type::mxfp4 || type == Type::nvfp4 ? kFp4Codebook : kIq4Codebook;
}

constexpr uint32_t kZeroPoint = 0x0f;  // the bits of a zeroed scale that hold its zero point

constexpr bool is_float8(Type type) { return type == Type::f8_e4m3 || type == Type::f8_e4m3_32; }

// The expanded layout of blocks of a grid or of ternary numbers, with a scale for `group` columns.
constexpr BlockLayout expanded_layout(int group) { return {256, 8, 0, group, 128, false, ScaleKind::expanded, false}; }

constexpr BlockLayout layout_of(Type type) {
  using Kind = ScaleKind;
  // clang-format off
  switch (type) {  //            columns low high group offset minimum scales           codebook
    case Type::q4_0:   return {  64,     4,  0,   32,   8,     false,  Kind::half,          false};
    case Type::q4_1:   return {  64,     4,  0,   32,   0,     true,   Kind::half,          false};
    case Type::q5_0:   return {  64,     4,  1,   32,   16,    false,  Kind::half,          false};
    case Type::q5_1:   return {  64,     4,  1,   32,   0,     true,   Kind::half,          false};
    case Type::q8_0:   return {  64,     8,  0,   32,   128,   false,  Kind::half,          false};
    case Type::iq4_nl: return {  64,     4,  0,   32,   128,   false,  Kind::half,          true};
    case Type::q2_k:   return {  256,    2,  0,   16,   0,     true,   Kind::nibbles,       false};
    case Type::q3_k:   return {  256,    2,  1,   16,   4,     false,  Kind::signed_byte,   false};
    case Type::q4_k:   return {  256,    4,  0,   32,   0,     true,   Kind::unsigned_byte, false};
    case Type::q5_k:   return {  256,    4,  1,   32,   0,     true,   Kind::unsigned_byte, false};
    case Type::q6_k:   return {  256,    6,  0,   16,   32,    false,  Kind::signed_byte,   false};
    case Type::iq4_xs: return {  256,    4,  0,   32,   128,   false,  Kind::signed_byte,   true};
    case Type::mxfp4:  return {  64,     4,  0,   32,   16,    false,  Kind::exponent,      true};
    case Type::int4_32:   return {64,    4,  0,   32,   8,     false,  Kind::bfloat,        false};
    case Type::int4_32z:  return {64,    4,  0,   32,   0,     true,   Kind::zeroed,        false};
    case Type::int4_128z: return {128,   4,  0,   128,  0,     true,   Kind::zeroed,        false};
    case Type::nvfp4:  return {  128,    4,  0,   16,   16,    false,  Kind::float8,        true};
    case Type::f8_e4m3:   return {128,   8,  0,   128,  0,     false,  Kind::single,        false};
    case Type::f8_e4m3_32: return {32,   8,  0,   32,   0,     false,  Kind::single,        false};
    case Type::iq1_s: case Type::iq2_xxs: case Type::iq3_xxs: case Type::iq3_s: case Type::tq1_0: case Type::tq2_0:
      return expanded_layout(32);
    case Type::iq1_m: case Type::iq2_xs: case Type::iq2_s: return expanded_layout(16);
    default:           return {  0,      0,  0,   32,   0,     false,  Kind::half,          false};
  }
  // clang-format on
}

// Columns that stay together when a matrix is divided.
constexpr int undivided_columns(Type type) {
  const int block = type_traits(type).block_elements, group = layout_of(type).columns ? layout_of(type).group : 1;
  return block > group ? block : group;
}

// Activations of byte types are bytes too.
// clang-format off
#define CKDIST_EACH_INTERLEAVED_TYPE(X) \
  X(iq1_s) X(iq1_m) X(iq2_xxs) X(iq2_xs) X(iq2_s) X(iq3_xxs) X(iq3_s) X(tq1_0) X(tq2_0)
#define CKDIST_EACH_ORDERED_TYPE(X) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) \
  X(mxfp4) X(int4_32) X(int4_32z) X(int4_128z) X(nvfp4)
#define CKDIST_EACH_FLOAT8_TYPE(X) X(f8_e4m3) X(f8_e4m3_32)
#define CKDIST_EACH_BLOCK_TYPE(X) CKDIST_EACH_ORDERED_TYPE(X) CKDIST_EACH_INTERLEAVED_TYPE(X) CKDIST_EACH_FLOAT8_TYPE(X)
#define CKDIST_EACH_TYPE(X) X(f32) X(f16) X(bf16) CKDIST_EACH_BLOCK_TYPE(X)
// clang-format on

// The ISA-independent part of a LinearKernel, compiled once. `pack` is the plain version; isa/pack_tile.cpp is faster.
template <Type type>
struct Tiles {
  static int64_t tile_bytes(int64_t cols);
  static void pack(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile);
  static void unpack_row(const uint8_t* tile, int row, int64_t cols, float* out);
};

}  // namespace ckdist
