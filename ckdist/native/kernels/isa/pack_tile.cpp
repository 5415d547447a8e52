// Packs stored rows to a tile: words of all rows are interleaved while they are read; then whole vectors are rearranged
// to planes.
//
// A format's words hold the codes of four columns, like the planes' words (kernels/layout.h), so only shifts and masks
// are needed. Whole blocks of sixteen rows are packed here. Incomplete rows and columns use the portable Tiles<type>.
#include "kernels/isa/pack_tile.h"

#include "kernels/interleaved.h"
#include "kernels/layout.h"
#if defined(__AVX2__) || defined(CKDIST_NEON)
#include "kernels/isa/words.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

#if defined(__AVX2__) || defined(CKDIST_NEON)
namespace {

constexpr int kLine = 64;  // bytes of a vector of all rows, and of a cache line
// Bytes of a row at a time, while the next bytes are prefetched: both fit the L2 cache with the packed tile.
constexpr int kStripBytes = 8 << 10;

// Sources and destination of kWordRows rows of one block, from `row` on.
struct BlockRows {
  const uint8_t* const* rows;
  int64_t at;      // offset of the block in a stored row
  uint8_t* block;  // packed block
  int row;
};

template <Type type>
CKDIST_INLINE uint8_t* plane_of(const BlockRows& b, int group) {
  return b.block + layout_of(type).planes() + group * layout_of(type).plane_bytes() + 4 * b.row;
}

template <int count>
CKDIST_INLINE void store_lines(uint8_t* p, const Words* words) {
  for (int i = 0; i < count; ++i) store(p + kLine * i, words[i]);
}

// Signed scales of six bits, which are stored with 32 added.
CKDIST_INLINE Words minus_32(Words bytes) {
  bytes ^= 0x20202020u;
  const Words sign = bytes & 0x20202020u;
  return bytes | sign << 1 | sign << 2;
}

// Bit 4 i + j of every word becomes bit 8 j + i. The bits i2 i1 i0 j1 j0 of the index become j1 j0 i2 i1 i0 in four
// exchanges of two bits.
CKDIST_INLINE Words bits_by_column(Words w) {
  const auto exchange = [&w](int shift, uint32_t mask) {
    const Words differ = (w >> shift ^ w) & mask;
    w ^= differ ^ differ << shift;
  };
  exchange(14, 0x0000ccccu);
  exchange(7, 0x00aa00aau);
  exchange(2, 0x0c0c0c0cu);
  exchange(1, 0x22222222u);
  return w;
}

// The 32-column types. `group` is the block's index in a packed block.
template <Type type>
CKDIST_INLINE void pack_group(const BlockRows& b, int group) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int codes_at = type == Type::mxfp4                           ? 1
                           : type == Type::nvfp4                         ? 6
                           : layout.group_scale_bytes() == 4 * kTileRows ? 4
                           : layout.high_bits                            ? (layout.minimum ? 8 : 6)
                           : layout.minimum                              ? 4
                                                                         : 2;
  uint8_t* const planes = plane_of<type>(b, group);
  if constexpr (layout.low_bits == 8) {
    Words words[8];
    load_transposed<2>(b.rows, b.at + codes_at, words);
    if constexpr (is_float8(type))
      for (Words& w : words) w = (w & 0xff0000ffu) | (w >> 8 & 0xff00u) | (w << 8 & 0xff0000u);
    else
      for (Words& w : words) w ^= 0x80808080u;
    store_lines<8>(planes, words);
  } else {
    Words words[4];  // columns 0..15 in low nibbles, as in the plane
    load_transposed<1>(b.rows, b.at + codes_at, words);
    store_lines<4>(planes, words);
  }
  if constexpr (layout.high_bits)
    store(planes + layout.low_bytes(), bits_by_column(load_word(b.rows, b.at + codes_at - 4)));
  if constexpr (layout.group_scale_bytes() == 4 * kTileRows) {
    const int scale = group * kGroupColumns / layout.group;  // all groups of one scale have the same
    store(b.block + layout.group_scales() + 4 * (scale * kTileRows + b.row), load_word(b.rows, b.at));
    return;
  }
  if constexpr (layout.scales == ScaleKind::exponent) {
    for (int row = 0; row < kWordRows; ++row)
      b.block[layout.group_scales() + group * kTileRows + b.row + row] = b.rows[row][b.at];
    return;
  }
  if constexpr (layout.scales == ScaleKind::float8) {
    store(b.block + layout.block_scale() + 4 * b.row, load_word(b.rows, b.at));
    for (int i = 0; i < layout.parts(); ++i)
      for (int row = 0; row < kWordRows; ++row)
        b.block[layout.group_scales() + (layout.parts() * group + i) * kTileRows + b.row + row] =
            b.rows[row][b.at + 4 + i];
    return;
  }
  const int half = 2 * (group * kTileRows + b.row);
  copy_halves(b.rows, b.at, b.block + layout.group_scales() + half);
  if constexpr (layout.minimum)
    // Added in the stored format, subtracted in the packed one.
    copy_halves(b.rows, b.at + 2, b.block + layout.group_minima() + half, 0x8000);
}

// q4_k and q5_k: block scales, 6-bit scales and minima, [high bits], low nibbles of 64 columns in 32 bytes.
template <Type type>
CKDIST_INLINE void pack_nibbles_k(const BlockRows& b) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int codes_at = layout.high_bits ? 48 : 16;
  for (int pair = 0; pair < 4; ++pair) {
    Words words[8];
    load_transposed<2>(b.rows, b.at + codes_at + 32 * pair, words);
    for (int i = 0; i < 4; ++i) {
      Words two[2] = {words[i], words[4 + i]};
      turn_fields<4>(two);
      store(plane_of<type>(b, 2 * pair) + kLine * i, two[0]);
      store(plane_of<type>(b, 2 * pair + 1) + kLine * i, two[1]);
    }
  }
  if constexpr (layout.high_bits) {
    Words words[8];
    load_transposed<2>(b.rows, b.at + 16, words);
    turn_fields<1>(words);
    for (int group = 0; group < 8; ++group) store(plane_of<type>(b, group) + layout.low_bytes(), words[group]);
  }
  Words
      // Block scales; six bits each of scales and minima 0..3 with top bits of 4..7; other bits of 4..7.
      head[4];
  load_transposed<1>(b.rows, b.at, head);
  store_low_halves(b.block + layout.block_scale() + 2 * b.row, head[0]);
  store_low_halves(b.block + layout.block_minimum() + 2 * b.row, head[0] >> 16);
  uint8_t* const scales = b.block + layout.group_scales() + b.row;
  store_bytes(scales, head[1] & 0x3f3f3f3fu);
  store_bytes(scales + 4 * kTileRows, (head[3] & 0x0f0f0f0fu) | (head[1] >> 2 & 0x30303030u));
  uint8_t* const minima = b.block + layout.group_minima() + 4 * b.row;
  store(minima, head[2] & 0x3f3f3f3fu);
  store(minima + 4 * kTileRows, (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 2 & 0x30303030u));
}

// Each half: low nibbles of 64 columns in 64 bytes twice, two high bits of four times 32 columns in 32 bytes.
CKDIST_INLINE void pack_q6_k(const BlockRows& b) {
  constexpr Type type = Type::q6_k;
  constexpr BlockLayout layout = layout_of(type);
  for (int half = 0; half < 2; ++half)
    for (int four = 0; four < 2; ++four) {  // steps of every group
      Words low[2][4], high[4];
      load_transposed<1>(b.rows, b.at + 64 * half + 16 * four, low[0]);
      load_transposed<1>(b.rows, b.at + 64 * half + 32 + 16 * four, low[1]);
      load_transposed<1>(b.rows, b.at + 128 + 32 * half + 16 * four, high);
      const auto pack = [&](int group, const Words* nibbles, int down, int left, int right) {
        Words codes[4];  // bits 6 and 7 are undefined
        for (int i = 0; i < 4; ++i) codes[i] = merge(0x0f0f0f0fu, nibbles[i] >> down, high[i] << left >> right);
        uint8_t* const plane = plane_of<type>(b, 4 * half + group) + kLine * 3 * four;
        for (int i = 0; i < 3; ++i) store(plane + kLine * i, merge(0x3f3f3f3fu, codes[i], codes[3] << (6 - 2 * i)));
      };
      pack(0, low[0], 0, 4, 0);
      pack(1, low[1], 0, 2, 0);
      pack(2, low[0], 4, 0, 0);
      pack(3, low[1], 4, 0, 2);
    }
  Words scales[4];
  load_transposed<1>(b.rows, b.at + 192, scales);
  for (int i = 0; i < 4; ++i) store_bytes(b.block + layout.group_scales() + b.row + 4 * kTileRows * i, scales[i]);
  copy_halves(b.rows, b.at + 208, b.block + layout.block_scale() + 2 * b.row);
}

// Each half: two bits of four times 32 columns in 32 bytes.
template <Type type>
CKDIST_INLINE void pack_crumbs_k(const BlockRows& b, int64_t at) {
  for (int half = 0; half < 2; ++half)
    for (int four = 0; four < 2; ++four) {
      Words words[4];
      load_transposed<1>(b.rows, b.at + at + 32 * half + 16 * four, words);
      turn_fields<2>(words);
      for (int group = 0; group < 4; ++group) store(plane_of<type>(b, 4 * half + group) + kLine * four, words[group]);
    }
}

CKDIST_INLINE void pack_q2_k(const BlockRows& b) {
  constexpr BlockLayout layout = layout_of(Type::q2_k);
  pack_crumbs_k<Type::q2_k>(b, 16);
  Words scales[4];
  load_transposed<1>(b.rows, b.at, scales);
  for (int i = 0; i < 4; ++i) store_bytes(b.block + layout.group_scales() + b.row + 4 * kTileRows * i, scales[i]);
  copy_halves(b.rows, b.at + 80, b.block + layout.block_scale() + 2 * b.row);
  copy_halves(b.rows, b.at + 82, b.block + layout.block_minimum() + 2 * b.row);
}

CKDIST_INLINE void pack_q3_k(const BlockRows& b) {
  constexpr Type type = Type::q3_k;
  constexpr BlockLayout layout = layout_of(type);
  pack_crumbs_k<type>(b, 32);
  Words high[8];
  load_transposed<2>(b.rows, b.at, high);
  turn_fields<1>(high);
  for (int group = 0; group < 8; ++group) store(plane_of<type>(b, group) + layout.low_bytes(), high[group]);
  // Twelve bytes of scales, then the block's scale, after two bytes of codes: nibbles of scales i and i + 8, two bits
  // each of i, i + 4, i + 8, i + 12.
  Words tail[4];
  load_transposed<1>(b.rows, b.at + 94, tail);
  const Words low[2] = {tail[0] >> 16 | tail[1] << 16, tail[1] >> 16 | tail[2] << 16},
              top = tail[2] >> 16 | tail[3] << 16;
  for (int i = 0; i < 4; ++i) {
    const Words scales = (low[i % 2] >> (i / 2 * 4) & 0x0f0f0f0fu) | (top >> (2 * i) & 0x03030303u) << 4;
    store_bytes(b.block + layout.group_scales() + b.row + 4 * kTileRows * i, minus_32(scales));
  }
  store_low_halves(b.block + layout.block_scale() + 2 * b.row, tail[3] >> 16);
}

CKDIST_INLINE void pack_iq4_xs(const BlockRows& b) {
  constexpr Type type = Type::iq4_xs;
  constexpr BlockLayout layout = layout_of(type);
  for (int group = 0; group < 8; ++group) {
    Words words[4];
    load_transposed<1>(b.rows, b.at + 8 + 16 * group, words);
    store_lines<4>(plane_of<type>(b, group), words);
  }
  Words head[4];  // the block's scale and two high bits of eight scales; their low nibbles
  load_transposed<1>(b.rows, b.at, head);
  store_low_halves(b.block + layout.block_scale() + 2 * b.row, head[0]);
  for (int i = 0; i < 2; ++i) {
    Words low = head[1] >> (16 * i) & 0xffffu, high = head[0] >> (16 + 8 * i) & 0xffu;
    low = (low | low << 8) & 0x00ff00ffu;
    low = (low | low << 4) & 0x0f0f0f0fu;
    high = (high | high << 12) & 0x000f000fu;
    high = (high | high << 6) & 0x03030303u;
    store_bytes(b.block + layout.group_scales() + b.row + 4 * kTileRows * i, minus_32(low | high << 4));
  }
}

// Copies words unchanged to their place.
template <Type type>
CKDIST_INLINE void pack_words(const BlockRows& b) {
  constexpr InterleavedLayout layout = interleaved_of(type);
  constexpr int fours = layout.words / 4;
  for (int four = 0; four < fours; ++four) {
    Words words[4];
    load_transposed<1>(b.rows, b.at + layout.words_at + 16 * four, words);
    store_lines<4>(b.block + kLine * 4 * four + 4 * b.row, words);
  }
  for (int i = 4 * fours; i < layout.words; ++i)
    store(b.block + kLine * i + 4 * b.row, load_word(b.rows, b.at + layout.words_at + 4 * i));
  if constexpr (layout.scale_at >= 0)
    copy_halves(b.rows, b.at + layout.scale_at, b.block + layout.scales() + 2 * b.row);
}

// Columns and bytes that are packed at a time: a packed block, or a few columns of floats.
template <Type type>
struct Unit {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int columns = layout.columns ? layout.columns : kFloatColumnPad;
  static constexpr int stored_bytes = columns / type_traits(type).block_elements * type_traits(type).block_bytes;
  static constexpr int used =
      is_interleaved(type) ? interleaved_of(type).scales() + (interleaved_of(type).scale_at < 0 ? 0 : 2 * kTileRows)
                           : layout.used();
  static constexpr int bytes = is_interleaved(type) ? interleaved_of(type).bytes()
                               : layout.columns     ? layout.bytes()
                                                    : kTileRows * stored_bytes;
};

template <Type type>
CKDIST_INLINE void pack_unit(const BlockRows& b) {
  if constexpr (type == Type::f32) {
    Words words[16];
    load_transposed<4>(b.rows, b.at, words);
    store_lines<16>(b.block + 4 * b.row, words);
  } else if constexpr (type == Type::bf16) {
    Words words[8];
    load_transposed<2>(b.rows, b.at, words);
    store_lines<8>(b.block + 4 * b.row, words);
  } else if constexpr (type == Type::f16) {
    Words words[8];
    load_transposed<2>(b.rows, b.at, words);
    for (int i = 0; i < 8; ++i) {
      store_low_halves(b.block + kLine * i + 2 * b.row, words[i]);
      store_low_halves(b.block + kLine * i + kLine / 2 + 2 * b.row, words[i] >> 16);
    }
  } else if constexpr (type == Type::q4_k || type == Type::q5_k) {
    pack_nibbles_k<type>(b);
  } else if constexpr (type == Type::q6_k) {
    pack_q6_k(b);
  } else if constexpr (type == Type::q2_k) {
    pack_q2_k(b);
  } else if constexpr (type == Type::q3_k) {
    pack_q3_k(b);
  } else if constexpr (type == Type::iq4_xs) {
    pack_iq4_xs(b);
  } else if constexpr (is_interleaved(type)) {
    pack_words<type>(b);
  } else {
    for (int group = 0; group < layout_of(type).columns / kGroupColumns; ++group)
      pack_group<type>({b.rows, b.at + group * type_traits(type).block_bytes, b.block, b.row}, group);
  }
}

// Prefetches the bytes [at, at + bytes) of every row to the L2 cache, a few lines at a time. It goes row by row,
// because the hardware's own prefetching follows one row, but not sixteen at once.
struct Fetch {
  const uint8_t* const* rows;
  int64_t at, bytes;
  int row;
  int64_t done;  // bytes of the row
};

CKDIST_INLINE void fetch_lines(Fetch& f, int64_t count) {
  for (; count > 0 && f.row < kTileRows; --count) {
    __builtin_prefetch(f.rows[f.row] + f.at + f.done, 0, 2);
    f.done += kLine;
    if (f.done >= f.bytes) f.done = 0, ++f.row;
  }
}

}  // namespace

template <Type type>
void pack_tile(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
  using U = Unit<type>;
  const int64_t units = rows == kTileRows ? cols / U::columns : 0;
  const int64_t strips = (units * U::stored_bytes + kStripBytes - 1) / kStripBytes,
                strip = strips ? (units + strips - 1) / strips : 0;
  for (int64_t begin = 0, end; begin < units; begin = end) {
    end = units - begin > strip ? begin + strip : units;
    // The next data: more columns, or the next tile if its rows continue these.
    Fetch next = {source_rows, end * U::stored_bytes, (units - end > strip ? strip : units - end) * U::stored_bytes, 0,
                  0};
    if (end == units) {
      next.at = source_rows[kTileRows - 1] - source_rows[0] + (source_rows[1] - source_rows[0]);
      next.bytes = strip * U::stored_bytes;
    }
    const int64_t lines = (kTileRows * ((next.bytes + kLine - 1) / kLine) + end - begin - 1) / (end - begin);
    for (int64_t unit = begin; unit < end; ++unit, tile += U::bytes) {
      fetch_lines(next, lines);
      for (int row = 0; row < kTileRows; row += kWordRows)
        pack_unit<type>({source_rows + row, unit * U::stored_bytes, tile, row});
      if constexpr (U::layout.columns) {
        if constexpr (!is_interleaved(type))
          std::memset(tile + U::layout.head(), 0, U::layout.planes() - U::layout.head());
        std::memset(tile + U::used, 0, U::bytes - U::used);
      }
    }
  }
  if (units * U::columns == cols) return;
  const uint8_t* rest[kTileRows];
  for (int row = 0; row < rows; ++row) rest[row] = source_rows[row] + units * U::stored_bytes;
  Tiles<type>::pack(rest, rows, cols - units * U::columns, tile);
}

#else

template <Type type>
void pack_tile(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
  Tiles<type>::pack(source_rows, rows, cols, tile);
}

#endif

#define CKDIST_INSTANTIATE(name) template void pack_tile<Type::name>(const uint8_t* const*, int, int64_t, uint8_t*);
CKDIST_EACH_TYPE(CKDIST_INSTANTIATE)
#undef CKDIST_INSTANTIATE

}  // namespace CKDIST_ISA
}  // namespace ckdist
