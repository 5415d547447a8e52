// Reads stored blocks of grids and of ternary numbers to codes, one row at a time.
#include <cstring>

#include "core/read_as.h"
#include "kernels/interleaved.h"
#include "kernels/layout_blocks.h"

namespace ckdist {
namespace {

uint32_t word_of(const uint8_t* source, int i) { return read_as<uint32_t>(source + 4 * i); }

template <Type type>
void read_grid_block(const uint8_t* source, Block& block) {
  constexpr Grid grid = grid_of(type);
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = kGroupColumns / layout.group;
  const uint8_t* const words = source + interleaved_of(type).words_at;
  for (int g = 0; g < layout.columns / kGroupColumns; ++g) {
    const auto bits = GroupBits<type, uint32_t>::of(g, [&](int i) { return word_of(words, i); });
    for (int i = 0; i < kGroupColumns; ++i) {
      const int level = level_of(grid, grid.entries[bits.index[i / grid.values]], i % grid.values);
      block.codes[kGroupColumns * g + i] = bits.signs >> i & 1 ? grid.negative[level] : grid.positive[level];
    }
    for (int p = 0; p < parts; ++p) block.scales[g * parts + p] = static_cast<uint8_t>(bits.scale[p]);
  }
}

template <Type type>
void read_ternary_block(const uint8_t* source, Block& block) {
  constexpr int powers[5] = {1, 3, 9, 27, 81};
  for (int step = 0; step < 64; ++step) {
    const TernaryPlace place = ternary_place(type, step);
    for (int i = 0; i < 4; ++i) {
      const int byte = source[4 * place.word + i];
      const int code = type == Type::tq2_0 ? byte >> (2 * place.part) & 3 : (byte * powers[place.part] & 0xff) * 3 >> 8;
      block.codes[4 * step + i] = static_cast<uint8_t>(layout_of(type).offset - 1 + code);
    }
  }
  std::memset(block.scales, 1, 8);
}

}  // namespace

template <Type type>
void read_interleaved_block(const uint8_t* source, Block& block) {
  constexpr InterleavedLayout layout = interleaved_of(type);
  if constexpr (layout.scale_at >= 0) std::memcpy(&block.scale, source + layout.scale_at, sizeof block.scale);
  else block.scale = static_cast<uint16_t>(iq1_m_scale(word_of(source, 12), word_of(source, 13)));
  if constexpr (grid_of(type).count > 0) read_grid_block<type>(source, block);
  else read_ternary_block<type>(source, block);
}

#define CKDIST_READ(name)                                            \
  template <>                                                        \
  void read_block<Type::name>(const uint8_t* source, Block& block) { \
    read_interleaved_block<Type::name>(source, block);               \
  }
CKDIST_EACH_INTERLEAVED_TYPE(CKDIST_READ)
#undef CKDIST_READ

}  // namespace ckdist
