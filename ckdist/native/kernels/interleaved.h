// Types that are packed as they are stored: the words of a block of 256 columns, with 16 rows interleaved. Their codes
// (indices into a grid, or ternary numbers) are expanded to a block of 8-bit codes (layout_of the type) in the cache:
// once for the tokens of a strip, or once for all tokens if several strips read them.
//
// A packed block is [word][16 rows] of 4 bytes, then the rows' float16 scales if they are separate, then padding to a
// cache line.
#pragma once
#include <cstdint>

#include "kernels/grids.h"
#include "kernels/layout.h"

namespace ckdist {

struct InterleavedLayout {
  int words;     // words of a row; 0: the type is packed in another way
  int words_at;  // offset of the words in a stored block
  int scale_at;  // offset of the block's float16 scale; -1: its bits are spread over the words
  float unit;    // value = block scale * unit * group scale * (code - 128)

  constexpr int scales() const { return 4 * kTileRows * words; }  // offset of the scales in a packed block
  constexpr int bytes() const { return (scales() + (scale_at < 0 ? 0 : 2 * kTileRows) + 63) / 64 * 64; }
};

constexpr InterleavedLayout interleaved_of(Type type) {
  switch (type) {
    case Type::iq1_s: return {12, 2, 0, 0.125f};
    case Type::iq1_m: return {14, 0, -1, 0.125f};
    case Type::iq2_xxs: return {16, 2, 0, 0.125f};
    case Type::iq2_xs: return {18, 2, 0, 0.125f};
    case Type::iq2_s: return {20, 2, 0, 0.125f};
    case Type::iq3_xxs: return {24, 2, 0, 0.25f};
    case Type::iq3_s: return {27, 2, 0, 1};
    case Type::tq1_0: return {13, 0, 52, 1};
    case Type::tq2_0: return {16, 0, 64, 1};
    default: return {0, 0, -1, 1};
  }
}

constexpr bool is_interleaved(Type type) { return interleaved_of(type).words > 0; }

// The grid of a type. A code is 128 + level, or 128 - level if the column's sign bit is set. IQ1: codes are 128 + 8 *
// level + 1, or - 1 if the bit is set, with levels -1, 0 and 1.
struct Grid {
  const uint16_t* entries;
  int count, values;                 // number of entries; values of an entry: 8 or 4
  uint8_t positive[8], negative[8];  // codes by level
};

constexpr Grid grid_of(Type type) {
  constexpr uint8_t o = 128;
  switch (type) {
    case Type::iq1_s:
    case Type::iq1_m: return {kGridIq1, 2048, 8, {o - 7, o + 1, o + 9}, {o - 9, o - 1, o + 7}};
    case Type::iq2_xxs: return {kGridIq2Xxs, 256, 8, {o + 8, o + 25, o + 43}, {o - 8, o - 25, o - 43}};
    case Type::iq2_xs: return {kGridIq2Xs, 512, 8, {o + 8, o + 25, o + 43}, {o - 8, o - 25, o - 43}};
    case Type::iq2_s: return {kGridIq2S, 1024, 8, {o + 8, o + 25, o + 43}, {o - 8, o - 25, o - 43}};
    case Type::iq3_xxs:
      return {kGridIq3Xxs,
              256,
              4,
              {o + 4, o + 12, o + 20, o + 28, o + 36, o + 44, o + 52, o + 62},
              {o - 4, o - 12, o - 20, o - 28, o - 36, o - 44, o - 52, o - 62}};
    case Type::iq3_s:
      return {kGridIq3S,
              512,
              4,
              {o + 1, o + 3, o + 5, o + 7, o + 9, o + 11, o + 13, o + 15},
              {o - 1, o - 3, o - 5, o - 7, o - 9, o - 11, o - 13, o - 15}};
    default: return {nullptr, 0, 0, {}, {}};
  }
}

// Index of the level of value `i` of an entry.
constexpr int level_of(const Grid& grid, uint32_t entry, int i) {
  return entry >> (16 / grid.values * i) & (grid.values == 8 ? 3 : 7);
}

// The codes of a grid's entries without sign bits, in words of 4 columns.
template <Type type>
struct GridWords {
  static constexpr Grid grid = grid_of(type);
  static constexpr int words = grid.values / 4;  // of an entry
  uint32_t codes[grid.count * words];

  constexpr GridWords() : codes() {
    for (int i = 0; i < grid.count * grid.values; ++i)
      codes[i / 4] |= uint32_t{grid.positive[level_of(grid, grid.entries[i / grid.values], i % grid.values)]}
                      << (8 * (i % 4));
  }
};
template <Type type>
inline constexpr GridWords<type> kGridWords = {};

// The fields of 32 columns of one row (Word is a number) or of several rows (a vector), for every way of storing them.
// `load(i)` returns word i of the block.
template <Type type, class Word>
struct GroupBits {
  Word index[8];  // indices of grid entries: 4 or 8
  Word signs;     // bit i is the sign of column i
  Word scale[2];  // scales of 16 columns each, or one of all

  template <class Load>
  [[gnu::always_inline]] static inline GroupBits of(int g, const Load& load);
};

// Sets the top bit of each byte, which has 7 bits, so that the number of ones is even.
template <class Word>
[[gnu::always_inline]] inline Word with_parity(Word bytes) {
  Word p = bytes ^ (bytes >> 4 & 0x0f0f0f0fu);
  p ^= p >> 2 & 0x3f3f3f3fu;
  p ^= p >> 1;
  return bytes | (p & 0x01010101u) << 7;
}

// Spreads four fields of 7 bits to four bytes.
template <class Word>
[[gnu::always_inline]] inline Word spread_sevens(Word w) {
  return (w & 0x7fu) | (w << 1 & 0x7f00u) | (w << 2 & 0x7f0000u) | (w << 3 & 0x7f000000u);
}

template <Type type, class Word>
template <class Load>
[[gnu::always_inline]] inline GroupBits<type, Word> GroupBits<type, Word>::of(int g, const Load& load) {
  GroupBits b = {};
  const int byte = 8 * (g % 4), pair = 16 * (g % 2);  // bit offsets of byte g of four, of half word g of two
  if constexpr (type == Type::iq2_xxs || type == Type::iq3_xxs) {
    const Word last = load(type == Type::iq2_xxs ? 2 * g + 1 : 16 + g);
    b.signs = with_parity(spread_sevens(last));
    b.scale[0] = (last >> 28) * 2 + 1;
    if constexpr (type == Type::iq2_xxs) {
      for (int j = 0; j < 4; ++j) b.index[j] = load(2 * g) >> (8 * j) & 0xffu;
    } else {
      for (int j = 0; j < 8; ++j) b.index[j] = load(2 * g + j / 4) >> (8 * (j % 4)) & 0xffu;
    }
  } else if constexpr (type == Type::iq2_xs) {
    const Word low = load(2 * g), high = load(2 * g + 1), scales = load(16 + g / 4) >> byte;
    for (int j = 0; j < 4; ++j) b.index[j] = (j < 2 ? low : high) >> (16 * (j % 2)) & 0x1ffu;
    b.signs =
        with_parity((low >> 9 & 0x7fu) | (low >> 17 & 0x7f00u) | (high << 7 & 0x7f0000u) | (high >> 1 & 0x7f000000u));
    for (int p = 0; p < 2; ++p) b.scale[p] = (scales >> (4 * p) & 0x0fu) * 2 + 1;
  } else if constexpr (type == Type::iq2_s) {
    const Word low = load(g), high = load(16 + g / 4) >> byte, scales = load(18 + g / 4) >> byte;
    for (int j = 0; j < 4; ++j) b.index[j] = (low >> (8 * j) & 0xffu) | (high >> (2 * j) & 3u) << 8;
    b.signs = load(8 + g);
    for (int p = 0; p < 2; ++p) b.scale[p] = (scales >> (4 * p) & 0x0fu) * 2 + 1;
  } else if constexpr (type == Type::iq3_s) {
    const Word high = load(16 + g / 4) >> byte;
    for (int j = 0; j < 8; ++j) b.index[j] = (load(2 * g + j / 4) >> (8 * (j % 4)) & 0xffu) | (high >> j & 1u) << 8;
    b.signs = load(18 + g);
    b.scale[0] = (load(26) >> (4 * g) & 0x0fu) * 2 + 1;
  } else if constexpr (type == Type::iq1_s) {
    const Word low = load(g), high = load(8 + g / 2) >> pair;
    for (int j = 0; j < 4; ++j) b.index[j] = (low >> (8 * j) & 0xffu) | (high >> (3 * j) & 7u) << 8;
    b.signs = -(high >> 15 & 1u);
    b.scale[0] = (high >> 12 & 7u) * 2 + 1;
  } else if constexpr (type == Type::iq1_m) {
    const Word low = load(g), high = load(8 + g / 2) >> pair;
    const Word scales = load(12 + g / 4) >> (16 * (g / 2 % 2) + 6 * (g % 2));
    for (int j = 0; j < 4; ++j) b.index[j] = (low >> (8 * j) & 0xffu) | (high >> (4 * j) & 7u) << 8;
    for (int j = 0; j < 4; ++j) b.signs |= (high >> (4 * j + 3) & 1u) * 0xffu << (8 * j);
    for (int p = 0; p < 2; ++p) b.scale[p] = (scales >> (3 * p) & 7u) * 2 + 1;
  }
  return b;
}

// IQ1_M's block scale: its four half words of scales have four bits of it each, at their top.
template <class Word>
[[gnu::always_inline]] inline Word iq1_m_scale(Word first, Word second) {
  return (first >> 12 & 0x000fu) | (first >> 24 & 0x00f0u) | (second >> 4 & 0x0f00u) | (second >> 16 & 0xf000u);
}

// The position of the ternary numbers of a step (4 columns). TQ1_0 has five in a byte, as a fraction of 3^5: columns
// 0..159 in words 0..7, columns 160..239 in words 8..11. Columns 240..255 are in word 12, four in a byte. TQ2_0 has
// four in a byte.
struct TernaryPlace {
  int word, part;
};
constexpr TernaryPlace ternary_place(Type type, int step) {
  if (type == Type::tq2_0) return {step / 32 * 8 + step % 8, step / 8 % 4};
  if (step < 40) return {step % 8, step / 8};
  if (step < 60) return {8 + (step - 40) % 4, (step - 40) / 4};
  return {12, step - 60};
}

}  // namespace ckdist
