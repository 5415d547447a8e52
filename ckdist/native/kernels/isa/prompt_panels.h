// Products of prompts with AMX: weights of any byte type are expanded to a panel of bfloat16 tiles in the L2 cache,
// once for all tokens, and multiplied as bfloat16. Scaling sums of 32 columns, as decode does, would cost more than the
// tiles. A weight is (block scale * group scale) * code - minimum in float32, rounded once to bfloat16. Weights of
// bfloat16 are multiplied in place. Private to isa/.
//
// A tile of 1 KB takes 6 ns from the L2 cache, 40 from the L3 cache and 70 from memory (Xeon, family 6 model 207), and
// a product of tiles takes 6 ns. So tiles from far away must serve many products (docs/how/tiles.md). A group is
// kPromptTiles tiles of weights by kPromptTokens tokens, in blocks of kPromptColumns columns. A block's weights and the
// sums of the group stay in the L2 cache. The activations of 32 tokens stay in the L1 cache for all tiles of weights,
// which are therefore streamed past it. Between blocks the sums wait in memory, so additions happen in the order of
// columns. Few activations (kWholeActivations) stay in the L2 cache for all weights: then a group is kWholeTiles tiles,
// in one block. Each step prefetches its share of the next tokens, of the next block's weights and of the result.
//
// A panel has pairs of tiles: [step of 32 columns][2 tiles][16 pairs of columns][16 rows][2].
#pragma once
#include "core/range.h"
#include "kernels/isa/linear_amx.h"
#include "kernels/isa/tile_steps.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Bfloat16 of sixteen rows' `first` and `second` columns, as [row][2].
inline __m512i pair_columns(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Byte `i` of each word as a float.
template <int i>
inline __m512 signed_byte(__m512i words) {
  if constexpr (i < 3) words = _mm512_slli_epi32(words, 24 - 8 * i);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 24));
}

constexpr int kPairBytes = 2 * kWeightBytes;  // of a step of two tiles
constexpr int64_t kPromptPairs = kPromptTiles / 2;

// Expands a block to bfloat16. `out`: the tile's part of the first step; the next step's is kPairBytes later.
template <Type type>
void expand_to_bf16(const Block<type>& block, uint8_t* out) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int words = layout.unit() / 4, words_of_step = kStepBytes / 8;  // words of four columns
  ExpandedBlock<type> expanded;
  expanded.read(block);
  for (int unit = 0; unit < layout.columns / layout.unit(); ++unit) {
    __m512 scale = expanded.scale(unit), minimum = _mm512_setzero_ps();
    if constexpr (layout.whole()) scale = _mm512_mul_ps(block.block_scale(), scale);
    if constexpr (ExpandedBlock<type>::kMinima > 0) {
      minimum = expanded.minimum(unit);
    } else if constexpr (layout.minimum) {
      const __m512i four = load(block.byte_minima() + 64 * (unit / 4));
      const __m512i bytes = _mm512_srl_epi32(four, _mm_cvtsi32_si128(8 * (unit % 4)));
      minimum =
          _mm512_mul_ps(block.block_minimum(), _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255))));
    }
    const auto value = [&](__m512 code) { return _mm512_fmsub_ps(code, scale, minimum); };
#pragma GCC unroll 8
    for (int i = 0; i < words; ++i) {
      const int word = unit * words + i;
      const __m512i codes = _mm512_load_si512(expanded.codes + 64 * word);
      uint8_t* const to = out + word / words_of_step * kPairBytes + word % words_of_step * 128;
      _mm512_store_si512(to, pair_columns(value(signed_byte<0>(codes)), value(signed_byte<1>(codes))));
      _mm512_store_si512(to + 64, pair_columns(value(signed_byte<2>(codes)), value(signed_byte<3>(codes))));
    }
  }
}

// Expands blocks [first, first + count) of a tile.
template <Type type>
void expand_tile(const uint8_t* tile, int64_t first, int64_t count, uint8_t* out) {
  constexpr Type form = form_of(type);
  constexpr int columns = layout_of(form).columns;
  ExpandedBlocks<form> stored;
  constexpr int bytes = stored.used ? interleaved_of(type).bytes() : layout_of(form).bytes();
  stored.begin(tile + first * bytes, expand_of<type>(), bytes);
  for (int64_t b = 0; b < count; ++b, out += columns / (kStepBytes / 2) * kPairBytes) {
    Block<form> block = {tile + (first + b) * bytes};
    if constexpr (stored.used) block.at = stored.template next<kStripTokens>();
    else fetch_lines(block.at + kNear, bytes / 64);
    expand_to_bf16<form>(block, out);
  }
}

// A block of a group, from its first tile, token and column on.
struct PromptBlock : TileSteps {
  int64_t pair_bytes;
  const uint8_t* next_weights;  // to prefetch, or null
  const uint8_t* next_x;        // to prefetch, or null
  bool begins, ends;            // the sums

  TileSteps of(int64_t pair, int64_t two_strips) const {
    TileSteps own = *this;
    own.weights += pair * pair_bytes, own.x += 2 * two_strips * strip_bytes;
    return own;
  }
};

// A group's weights and tokens, and its result. A pair of tiles are neighbours, or tiles of gate and up of the same
// rows.
struct PromptGroup {
  const PromptProduct& product;
  int64_t tile, tiles;  // tiles: of gate and up together
  int64_t token, tokens;
  float* waiting;  // [strip of 32 tokens][pair of tiles][tile of sums]

  bool gated() const { return product.up != nullptr; }
  int64_t rows_of_pair() const { return gated() ? kTileRows : 2 * kTileRows; }
  int64_t tile_bytes() const { return gated() ? product.up - product.matrix.tiles : product.matrix.tile_bytes; }
  int64_t pair_bytes() const { return (gated() ? 1 : 2) * product.matrix.tile_bytes; }
  const uint8_t* tile_at(int64_t t) const {
    return product.matrix.tiles + tile * product.matrix.tile_bytes + t / 2 * pair_bytes() + t % 2 * tile_bytes();
  }

  // Tokens from `first` on, and a pair of tiles.
  TileStrip strip(int64_t first, int64_t pair) const {
    const int64_t row = tile * kTileRows + pair * rows_of_pair();
    TileStrip s{};
    s.tokens = static_cast<int>(least(kTokensAtOnce, tokens - first));
    s.tile_count = tiles - 2 * pair > 1 ? 2 : 1;
    s.rows = static_cast<int>(least(rows_of_pair(), product.matrix.rows - row));
    s.y = product.y + (token + first) * product.y_stride + row, s.y_stride = product.y_stride;
    return s;
  }

  // Ends a strip, whose sums are in tiles.
  void end(TileStrip strip, float* sums) const {
    if (!gated() && strip.whole()) return store_sums(strip);
    store_tiles(strip, sums);
    for (int s = 0; s < strip.strips() && gated(); ++s) {
      float* const gate = sums + 2 * s * kTileSums;
      product.gated(product.function, gate, gate + kTileSums, strip.strip_tokens(s) * kTileRows, gate);
    }
    if (gated()) strip.tile_count = 1;
    write_sums(strip, sums);
  }
};

inline void multiply_block(const PromptGroup& group, const PromptBlock& block, int& configured) {
  const int64_t strips = (group.tokens + kTokensAtOnce - 1) / kTokensAtOnce, pairs = (group.tiles + 1) / 2;
  for (int64_t i = 0; i < strips; ++i) {
    const uint8_t* const next_x = block.next_x && i + 1 < strips ? block.of(0, i + 1).x : block.next_x;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const TileStrip strip = group.strip(i * kTokensAtOnce, pair);
      float* const waiting = group.waiting + (i * kPromptPairs + pair) * kSumsTiles * kTileSums;
      if (strip.tokens != configured) configure(configured = strip.tokens, kTileRowBytes);
      if (block.begins) zero_sums(strip.strips());
      else load_tiles(strip, waiting);
      if (strip.tokens == kTokensAtOnce && strip.tile_count == 2) {
        const uint8_t* const next = block.next_weights ? block.next_weights + pair * block.pair_bytes : nullptr;
        const int64_t bytes = block.count * kWeightBytes;
        add_steps(block.of(pair, i), FetchTwo(next, block.tile_bytes, bytes, i, strips, block.count),
                  FetchTwo(next_x, block.strip_bytes, bytes, pair, pairs, block.count), FetchResult(strip, block.ends));
      } else {
        add_some_steps(strip, block.of(pair, i));
      }
      if (block.ends) group.end(strip, waiting);
      else store_tiles(strip, waiting);
    }
  }
}

// Copies the weights of bfloat16 of some columns to a panel. Columns beyond the last are zero.
inline void copy_tile(const uint8_t* tile, int64_t first, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < (blocks + 1) / 2 * 2; ++b) {  // blocks of 16 columns
    uint8_t* const to = out + b / 2 * kPairBytes + b % 2 * (kWeightBytes / 2);
    if (b < blocks) std::memcpy(to, tile + (first + b) * (kWeightBytes / 2), kWeightBytes / 2);
    else std::memset(to, 0, kWeightBytes / 2);
  }
}

// The weights of a block: those of bfloat16 in place, if they are whole steps. Others are expanded to the panel.
template <Type type>
void take_weights(const PromptGroup& group, Range own, PromptBlock& block, uint8_t* panel) {
  const int64_t column = own.begin, columns = own.end - own.begin;
  const auto part_of_panel = [&](int64_t t) { return panel + t / 2 * block.pair_bytes + t % 2 * kWeightBytes; };
  block.step_bytes = kPairBytes, block.tile_bytes = kWeightBytes, block.next_weights = nullptr;
  block.weights = panel;
  if constexpr (type == Type::bf16) {
    const int64_t blocks = (columns + 15) / 16;
    block.count = (blocks + 1) / 2;
    if (blocks % 2 == 0) {
      block.step_bytes = kWeightBytes, block.tile_bytes = group.tile_bytes(), block.pair_bytes = group.pair_bytes();
      block.weights = group.tile_at(0) + column * 2 * kTileRows;
      block.next_weights =
          block.ends ? group.tile_at((group.tiles + 1) / 2 * 2) : block.weights + columns * 2 * kTileRows;
      return;
    }
    block.pair_bytes = block.count * kPairBytes;
    for (int64_t t = 0; t < group.tiles; ++t) copy_tile(group.tile_at(t), column / 16, blocks, part_of_panel(t));
  } else {
    constexpr int width = layout_of(form_of(type)).columns;
    static_assert(kPromptColumns % width == 0);
    const int64_t blocks = (columns + width - 1) / width;
    block.count = blocks * width * 2 / kStepBytes, block.pair_bytes = block.count * kPairBytes;
    for (int64_t t = 0; t < group.tiles; ++t)
      expand_tile<type>(group.tile_at(t), column / width, blocks, part_of_panel(t));
  }
}

template <Type type>
void multiply_prompt(const PromptProduct& p) {
  float* const waiting = reinterpret_cast<float*>(p.room + kPanelBytes);
  const bool whole =
      p.strips && p.matrix.cols <= kWholeColumns && p.matrix.cols * least(p.tokens, kPromptTokens) <= kWholeActivations;
  const int64_t first = p.matrix.first_column,
                tiles_each = whole      ? kWholeTiles
                             : p.strips ? kPromptTiles
                                        : kRowsTiles,
                columns_each = whole      ? kWholeColumns
                               : p.strips ? kPromptColumns
                                          : kRowsColumns;
  const int matrices = p.up ? 2 : 1;
  int configured = 0;
  const auto multiply = [&](int64_t tile, int64_t token) {
    const int64_t tiles = least(tiles_each / matrices, p.tile_end - tile);
    const PromptGroup group{p, tile, matrices * tiles, token, least(kPromptTokens, p.tokens - token), waiting};
    const uint8_t* const rows = p.x + token * p.x_stride;
    for (int64_t column = 0; column < p.matrix.cols; column += columns_each) {
      PromptBlock block{};
      const Range own{column, least(column + columns_each, p.matrix.cols)};
      block.begins = column == 0, block.ends = own.end == p.matrix.cols;
      take_weights<type>(group, own, block, p.room);
      block.x = rows + (p.strips ? ActivationRow::strip_offset(0, first + column, p.x_stride) : (first + column) * 2);
      block.token_bytes = p.strips ? kStepBytes : p.x_stride;
      block.x_bytes = p.strips ? kWeightBytes : kStepBytes, block.strip_bytes = kStripTokens * p.x_stride;
      block.next_x = p.strips && !block.ends ? block.x + block.count * kWeightBytes : nullptr;
      multiply_block(group, block, configured);
    }
  };
  const int64_t tiles_step = tiles_each / matrices;
  if (whole) {
    for (int64_t token = 0; token < p.tokens; token += kPromptTokens)
      for (int64_t tile = p.tile_begin; tile < p.tile_end; tile += tiles_step) multiply(tile, token);
  } else {
    for (int64_t tile = p.tile_begin; tile < p.tile_end; tile += tiles_step)
      for (int64_t token = 0; token < p.tokens; token += kPromptTokens) multiply(tile, token);
  }
  if (configured) tile_release();
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
