#include "kernels/layout.h"

#include <cstring>
#include <type_traits>

#include "kernels/half.h"
#include "kernels/interleaved.h"
#include "kernels/layout_blocks.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed layout and GGUF's blocks are little-endian"
#endif

namespace ckdist {
namespace {

constexpr int kSteps = kGroupColumns / 4;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

void store16(uint8_t* at, int index, uint16_t value) { std::memcpy(at + 2 * index, &value, sizeof value); }
uint16_t load16(const uint8_t* at, int index) { return read_as<uint16_t>(at + 2 * index); }
void store32(uint8_t* at, uint32_t value) { std::memcpy(at, &value, sizeof value); }
uint32_t load32(const uint8_t* at) { return read_as<uint32_t>(at); }

// Exchanges the second and third byte of a word, as in the columns of 8-bit floats.
uint32_t swapped(uint32_t word) { return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u); }

// Packs one row's 32 codes, in words of 4 columns, to one plane of `bits` bits per code, from bit `shift` of the code
// on.
template <int bits, int shift>
void pack_plane(const uint32_t* words, uint8_t* plane) {
  if constexpr (bits == 6) {
    for (int step = 0; step < kSteps; step += 4)
      for (int v = 0; v < 3; ++v)
        store32(plane + 64 * (step / 4 * 3 + v), words[step + v] | (words[step + 3] >> (2 * v) & 0x03030303u) << 6);
    return;
  }
  constexpr int per_vector = 8 / bits;
  constexpr uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  // The position of step s: nibbles are in part s / vectors of vector s % vectors, two bits in part s % 4 of vector s /
  // 4.
  constexpr int vectors = kSteps / per_vector;
  for (int v = 0; v < vectors; ++v) {
    uint32_t word = 0;
    for (int part = 0; part < per_vector; ++part)
      word |= (words[bits == 4 ? v + vectors * part : v * per_vector + part] >> shift & mask) << (bits * part);
    store32(plane + 64 * v, word);
  }
}

template <int bits, int shift>
void unpack_plane(const uint8_t* plane, uint32_t* words) {
  if constexpr (bits == 6) {
    for (int step = 0; step < kSteps; step += 4)
      for (int v = 0; v < 3; ++v) {
        const uint32_t word = load32(plane + 64 * (step / 4 * 3 + v));
        words[step + v] = word & 0x3f3f3f3fu;
        words[step + 3] |= (word >> 6 & 0x03030303u) << (2 * v);
      }
    return;
  }
  constexpr int per_vector = 8 / bits;
  constexpr uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  constexpr int vectors = kSteps / per_vector;
  for (int v = 0; v < vectors; ++v)
    for (int part = 0; part < per_vector; ++part)
      words[bits == 4 ? v + vectors * part : v * per_vector + part] |= (load32(plane + 64 * v) >> (bits * part) & mask)
                                                                       << shift;
}

// Offset of the byte of a group's minimum in a packed block.
template <Type type>
int minimum_at(int group, int row) {
  return layout_of(type).group_minima() + group / 4 * 4 * kTileRows + row * 4 + group % 4;
}

// Packs codes and scales of one source block to row `row` of a packed block, from its column `first` on.
template <Type type>
void pack_block(const Block& source, int row, int first, uint8_t* block) {
  constexpr BlockLayout layout = layout_of(type);
  const int columns = type_traits(type).block_elements;
  for (int start = 0; start < columns; start += kGroupColumns) {
    uint32_t words[kSteps];
    std::memcpy(words, source.codes + start, sizeof words);
    if constexpr (is_float8(type))
      for (uint32_t& word : words) word = swapped(word);
    uint8_t* planes = block + layout.planes() + (first + start) / kGroupColumns * layout.plane_bytes() + 4 * row;
    pack_plane<layout.low_bits, 0>(words, planes);
    if constexpr (layout.high_bits > 0)
      pack_plane<layout.high_bits, layout.low_bits>(words, planes + layout.low_bytes());
  }
  if constexpr (layout.group_scale_bytes() == 4 * kTileRows) {
    store32(block + layout.group_scales() + first / layout.group * layout.group_scale_bytes() + 4 * row, source.word);
  } else if constexpr (layout.group_scale_bytes() == 2 * kTileRows) {
    const int group = first / layout.group;
    store16(block + layout.group_scales() + group * layout.group_scale_bytes(), row, source.scale);
    if (layout.minimum)
      store16(block + layout.group_minima() + group * layout.group_scale_bytes(), row, source.minimum);
  } else if constexpr (layout.scales == ScaleKind::exponent) {
    block[layout.group_scales() + first / layout.group * kTileRows + row] = source.scales[0];
  } else if constexpr (layout.scales == ScaleKind::float8) {
    store32(block + layout.block_scale() + 4 * row, source.word);
    for (int i = 0; i < layout.parts(); ++i)
      block[layout.group_scales() + (first / layout.group + i) * kTileRows + row] = source.scales[i];
  } else {
    store16(block + layout.block_scale(), row, source.scale);
    if (layout.minimum) store16(block + layout.block_minimum(), row, source.minimum);
    for (int group = 0; group < layout.groups(); ++group) {
      block[layout.group_scales() + group * kTileRows + row] = source.scales[group];
      if (layout.scales == ScaleKind::unsigned_byte) block[minimum_at<type>(group, row)] = source.minima[group];
    }
  }
}

template <Type type>
void unpack_block(const uint8_t* block, int row, int first, Block& out) {
  constexpr BlockLayout layout = layout_of(type);
  const int columns = type_traits(type).block_elements;
  for (int start = 0; start < columns; start += kGroupColumns) {
    uint32_t words[kSteps] = {};
    const uint8_t* planes = block + layout.planes() + (first + start) / kGroupColumns * layout.plane_bytes() + 4 * row;
    unpack_plane<layout.low_bits, 0>(planes, words);
    if constexpr (layout.high_bits > 0)
      unpack_plane<layout.high_bits, layout.low_bits>(planes + layout.low_bytes(), words);
    if constexpr (is_float8(type))
      for (uint32_t& word : words) word = swapped(word);
    std::memcpy(out.codes + start, words, sizeof words);
  }
  if constexpr (layout.group_scale_bytes() == 4 * kTileRows) {
    out.word = load32(block + layout.group_scales() + first / layout.group * layout.group_scale_bytes() + 4 * row);
  } else if constexpr (layout.group_scale_bytes() == 2 * kTileRows) {
    const int group = first / layout.group;
    out.scale = load16(block + layout.group_scales() + group * layout.group_scale_bytes(), row);
    if (layout.minimum) out.minimum = load16(block + layout.group_minima() + group * layout.group_scale_bytes(), row);
  } else if constexpr (layout.scales == ScaleKind::exponent) {
    out.scales[0] = block[layout.group_scales() + first / layout.group * kTileRows + row];
  } else if constexpr (layout.scales == ScaleKind::float8) {
    out.word = load32(block + layout.block_scale() + 4 * row);
    for (int i = 0; i < layout.parts(); ++i)
      out.scales[i] = block[layout.group_scales() + (first / layout.group + i) * kTileRows + row];
  } else {
    out.scale = load16(block + layout.block_scale(), row);
    if (layout.minimum) out.minimum = load16(block + layout.block_minimum(), row);
    for (int group = 0; group < layout.groups(); ++group) {
      out.scales[group] = block[layout.group_scales() + group * kTileRows + row];
      if (layout.scales == ScaleKind::unsigned_byte) out.minima[group] = block[minimum_at<type>(group, row)];
    }
  }
}

template <Type type>
struct BlockTiles {
  static constexpr BlockLayout layout = layout_of(type);

  static int64_t tile_bytes(int64_t cols) { return round_up(cols, layout.columns) / layout.columns * layout.bytes(); }

  static void pack(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
    const TypeTraits& traits = type_traits(type);
    const bool whole = rows == kTileRows && cols % layout.columns == 0;
    Block source;
    for (int64_t column = 0; column < cols; column += layout.columns, tile += layout.bytes()) {
      if (whole) {
        std::memset(tile + layout.head(), 0, layout.planes() - layout.head());
        std::memset(tile + layout.used(), 0, layout.bytes() - layout.used());
      } else {
        std::memset(tile, 0, layout.bytes());
      }
      for (int row = 0; row < rows; ++row)
        for (int first = 0; first < layout.columns && column + first < cols; first += traits.block_elements) {
          read_block<type>(source_rows[row] + (column + first) / traits.block_elements * traits.block_bytes, source);
          pack_block<type>(source, row, first, tile);
        }
    }
  }

  static void unpack_row(const uint8_t* tile, int row, int64_t cols, float* out) {
    const int elements = type_traits(type).block_elements;
    Block block;
    for (int64_t column = 0; column < cols; column += elements) {
      unpack_block<type>(tile + column / layout.columns * layout.bytes(), row,
                         static_cast<int>(column % layout.columns), block);
      block_values<type>(block, out + column);
    }
  }
};

template <Type type>
struct InterleavedTiles {
  static constexpr InterleavedLayout layout = interleaved_of(type);
  static constexpr int columns = layout_of(type).columns, stored_bytes = type_traits(type).block_bytes;

  static int64_t tile_bytes(int64_t cols) { return round_up(cols, columns) / columns * layout.bytes(); }

  static void pack(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
    for (int64_t block = 0; block < cols / columns; ++block, tile += layout.bytes()) {
      std::memset(tile, 0, layout.bytes());
      for (int row = 0; row < rows; ++row) {
        const uint8_t* const source = source_rows[row] + block * stored_bytes;
        for (int i = 0; i < layout.words; ++i)
          store32(tile + 4 * (kTileRows * i + row), load32(source + layout.words_at + 4 * i));
        if (layout.scale_at >= 0) store16(tile + layout.scales(), row, load16(source + layout.scale_at, 0));
      }
    }
  }

  static void unpack_row(const uint8_t* tile, int row, int64_t cols, float* out) {
    for (int64_t column = 0; column < cols; column += columns, tile += layout.bytes()) {
      uint8_t source[stored_bytes];
      for (int i = 0; i < layout.words; ++i)
        store32(source + layout.words_at + 4 * i, load32(tile + 4 * (kTileRows * i + row)));
      if (layout.scale_at >= 0) store16(source + layout.scale_at, 0, load16(tile + layout.scales(), row));
      Block block;
      read_block<type>(source, block);
      block_values<type>(block, out + column);
    }
  }
};

// Element: the bits of one weight. depth: columns that are stored together, [column / depth][16 rows][depth].
template <class Element, int depth, float (*value)(Element)>
struct FloatTiles {
  static int64_t tile_bytes(int64_t cols) {
    return round_up(cols, kFloatColumnPad) * kTileRows * static_cast<int64_t>(sizeof(Element));
  }

  static int64_t index(int64_t column, int row) { return (column / depth * kTileRows + row) * depth + column % depth; }

  static void pack(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
    const int64_t whole = cols / kFloatColumnPad * kFloatColumnPad;
    std::memset(tile, 0, static_cast<size_t>(rows == kTileRows ? 0 : tile_bytes(whole)));
    std::memset(tile + tile_bytes(whole), 0, static_cast<size_t>(tile_bytes(cols) - tile_bytes(whole)));
    for (int64_t start = 0; start < cols; start += kFloatColumnPad) {  // a few cache lines of each row at a time
      const int count = static_cast<int>(cols - start < kFloatColumnPad ? cols - start : kFloatColumnPad);
      for (int row = 0; row < rows; ++row) {
        Element source[kFloatColumnPad];
        std::memcpy(source, source_rows[row] + start * sizeof(Element), count * sizeof(Element));
        for (int i = 0; i < count; ++i)
          std::memcpy(tile + index(start + i, row) * sizeof(Element), source + i, sizeof(Element));
      }
    }
  }

  static void unpack_row(const uint8_t* tile, int row, int64_t cols, float* out) {
    for (int64_t column = 0; column < cols; ++column) {
      Element bits = read_as<Element>(tile + index(column, row) * sizeof(Element));
      out[column] = value(bits);
    }
  }
};

template <Type type>
struct Format : std::conditional_t<is_interleaved(type), InterleavedTiles<type>, BlockTiles<type>> {};
template <>
struct Format<Type::f32> : FloatTiles<uint32_t, 1, float_of_bits> {};
template <>
struct Format<Type::f16> : FloatTiles<uint16_t, 1, float_of_half> {};
template <>
struct Format<Type::bf16> : FloatTiles<uint16_t, 2, float_of_bf16> {};

}  // namespace

template <Type type>
int64_t Tiles<type>::tile_bytes(int64_t cols) {
  return Format<type>::tile_bytes(cols);
}

template <Type type>
void Tiles<type>::pack(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile) {
  Format<type>::pack(source_rows, rows, cols, tile);
}

template <Type type>
void Tiles<type>::unpack_row(const uint8_t* tile, int row, int64_t cols, float* out) {
  Format<type>::unpack_row(tile, row, cols, out);
}

#define CKDIST_INSTANTIATE(name) template struct Tiles<Type::name>;
CKDIST_EACH_TYPE(CKDIST_INSTANTIATE)
#undef CKDIST_INSTANTIATE

}  // namespace ckdist
