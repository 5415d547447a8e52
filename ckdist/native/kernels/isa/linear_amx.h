// Products with AMX: 32 tokens by 32 rows of weights at a time, as two by two tiles of sums over two tiles of
// activations and two of weights. The packed layout is the layout of a tile of weights, [column / 4][16 rows][4
// columns] (bfloat16: [column / 2][16][2]).
//
// Bytes: activations have a scale per 32 columns, so an int32 sum ends there. A tile of weights is 8 rows deep (4 rows
// if the weights' scales change every 16 columns), half of the hardware's maximum. Then scaling costs most: a
// conversion, a product and a fused addition per 32 columns of 16 sums, more than the tiles themselves. To add nothing
// to that, blocks are expanded to signed codes and float scales, once for all 32 tokens, and sums of up to 128 columns
// are scaled with totals in registers. The results are bit for bit those of AVX-512, which handles few tokens: integers
// are exact, and floats are added in the same order.
#pragma once
#include <cstring>

#include "kernels/interleaved.h"
#include "kernels/isa/bf16_tiles.h"

namespace ckdist {

namespace avx512_vnni {
extern const KernelTable ordered_kernels, interleaved_kernels;
}

namespace CKDIST_ISA {
namespace {

constexpr int kProductBytes = 16 << 10;  // bytes of int32 sums before scaling, a part of the L1 cache

// From this number of tokens on, tiles multiply bytes faster than vectors.
template <Type type>
constexpr int64_t kTilesFrom = layout_of(type).parts() > 1 ? 24 : 10;

// Up to two tiles of weights of bytes, by up to two strips of tokens.
struct ByteStrip : TileStrip {
  const uint8_t* tiles;
  int64_t tile_bytes;
  int64_t blocks;
  const uint8_t* x;    // row of the first token
  int64_t x_stride;    // in bytes
  int64_t padded;      // columns of such a row
  int64_t column;      // the first column
  ExpandBlock expand;  // for types that are packed as they are stored; bytes of such a block
  int block_bytes;
  bool fetched;  // the weights come from memory

  // Prefetches `lines` of each tile, beginning `done` bytes after the tile's part of block b. At a tile's end,
  // continues with the next tiles.
  [[gnu::always_inline]] void fetch_ahead(int64_t b, int bytes, int64_t done, int lines) const {
    if (!fetched) return;
    const int64_t at = b * bytes + done + kNear, past = at < blocks * bytes ? 0 : (tile_count - 1) * tile_bytes;
    for (int i = 0; i < tile_count; ++i) fetch_lines(tiles + i * tile_bytes + at + past, lines);
  }
};

// A block of a packed tile for tiles and scaling: signed codes without offset, and scales and minima in float32 (minima
// of bytes stay in place).
template <Type type>
struct ExpandedBlock {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kMinima = layout.minimum && !layout.whole() ? layout.groups() : 0;
  alignas(64) int8_t codes[layout.columns * kTileRows];  // [column / 4][row][4]
  alignas(64) float scales[layout.groups() * kTileRows];
  alignas(64) float minima[(kMinima ? kMinima : 1) * kTileRows];

  __m512 scale(int group) const { return _mm512_load_ps(scales + layout.scale_of(group) * kTileRows); }
  __m512 minimum(int group) const { return _mm512_load_ps(minima + layout.scale_of(group) * kTileRows); }

  void read(const Block<type>& block) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(layout.offset));
    int8_t* to = codes;
    for (int g = 0; g < layout.columns / kGroupColumns; ++g, to += kGroupColumns * kTileRows) {
      const uint8_t* planes = block.planes(g);
      const __m512i steps[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes), read_step<type, 2>(planes),
                                     read_step<type, 3>(planes), read_step<type, 4>(planes), read_step<type, 5>(planes),
                                     read_step<type, 6>(planes), read_step<type, 7>(planes)};
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) _mm512_store_si512(to + 64 * s, _mm512_sub_epi8(steps[s], offset));
    }
    for (int g = 0; g < layout.groups(); ++g) {
      const int unit = g * layout.group / layout.unit();
      const __m512i of_group = block.scale(unit);
      _mm512_store_ps(scales + g * kTileRows,
                      layout.whole() ? _mm512_cvtepi32_ps(of_group) : _mm512_castsi512_ps(of_group));
      if constexpr (kMinima > 0) _mm512_store_ps(minima + g * kTileRows, _mm512_castsi512_ps(block.minimum(unit)));
    }
  }
};

// Number of groups of 32 columns whose sums are scaled together.
template <Type type>
constexpr int groups_together() {
  constexpr int groups = layout_of(type).columns / kGroupColumns;
  constexpr int fitting = kProductBytes / (kSumsTiles * 4 * kTileSums) * layout_of(type).unit() / kGroupColumns;
  return groups < fitting ? groups : fitting;
}

// Scales the sums of groups [first, first + groups_together) of a block and adds them to the totals of 16 rows x
// `tokens`. products: [group][part][tile of sums][token][row], at this tile of sums. x: the tokens' activations at the
// first group. Integer scales are multiplied as float32, which is exact: no product exceeds 2^24. The largest are 127 *
// 127 * 32 columns * 32 (IQ4_XS) and 32 * 127 * 32 columns * 128 (Q6_K).
template <Type type>
void add_scaled(const ExpandedBlock<type>& expanded, const Block<type>& block, int first, const int32_t* products,
                const Columns& x, const uint8_t* group_sums, int64_t x_stride, int tokens, float* of_block,
                float* sums) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int together = groups_together<type>(), parts = layout.parts();
  const bool last = first + together == layout.columns / kGroupColumns;
  __m512 scale[together * parts], minimum[together * parts];
#pragma GCC unroll 4
  for (int i = 0; i < together * parts; ++i) {
    scale[i] = expanded.scale(first * parts + i);
    if constexpr (ExpandedBlock<type>::kMinima > 0) minimum[i] = expanded.minimum(first * parts + i);
  }
  for (int t = 0; t < tokens; ++t) {
    const int64_t row = t * x_stride;
    float* const total_at = (layout.whole() ? of_block : sums) + t * kTileRows;
    __m512 total = layout.whole() && first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(total_at);
#pragma GCC unroll 4
    for (int g = 0; g < together; ++g) {
      __m512 scaled;
#pragma GCC unroll 2
      for (int p = 0; p < parts; ++p) {
        const int i = g * parts + p;
        const __m512 part =
            _mm512_cvtepi32_ps(_mm512_load_si512(products + i * kSumsTiles * kTileSums + t * kTileRows));
        scaled = p == 0 ? _mm512_mul_ps(part, scale[i]) : _mm512_fmadd_ps(part, scale[i], scaled);
        if constexpr (ExpandedBlock<type>::kMinima > 0) {
          const uint8_t* const of_token = (parts == 1 ? x.sums32 : x.sums16) + row + 4 * i;
          scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(read_sums<type>(of_token)), minimum[i], scaled);
        }
      }
      total = _mm512_fmadd_ps(scaled, _mm512_castsi512_ps(broadcast32(x.scales + row + 4 * g)), total);
    }
    if (!layout.whole() || !last) {
      _mm512_store_ps(total_at, total);
      continue;
    }
    __m512 sum = _mm512_fmadd_ps(total, block.block_scale(), _mm512_load_ps(sums + t * kTileRows));
    if constexpr (layout.scales == ScaleKind::unsigned_byte) {
      const __m512i minima[2] = {load(block.byte_minima()), load(block.byte_minima() + 64)};
      sum = add_minima(sum, minima, block.block_minimum(), group_sums + row);
    }
    _mm512_store_ps(sums + t * kTileRows, sum);
  }
}

template <Type type>
void byte_strip(const ByteStrip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int together = groups_together<type>(), parts = layout.parts();
  static_assert(together > 0 && layout.columns / kGroupColumns % together == 0, "a block is scaled in equal parts");
  alignas(64) int32_t products[together * parts * kSumsTiles * kTileSums];
  alignas(64) float of_block[kSumsTiles * kTileSums], sums[kSumsTiles * kTileSums];
  std::memset(sums, 0, sizeof sums);
  ExpandedBlock<type> expanded[2];
  constexpr int bytes = layout.bytes(), parts_of_block = layout.columns / kGroupColumns / together,
                lines = (bytes / 64 + parts_of_block - 1) / parts_of_block;
  ExpandedBlocks<type> stored[2];
  for (int i = 0; i < 2; ++i) stored[i].begin(strip.tiles + i * strip.tile_bytes, strip.expand, strip.block_bytes);
  Columns x = Columns::of(strip.x, strip.padded, strip.column);
  const uint8_t* group_sums = Columns::group_sums(strip.x, strip.padded, strip.column);
  for (int64_t b = 0; b < strip.blocks; ++b, group_sums += sizeof(GroupSums)) {
    Block<type> blocks[2] = {{strip.tiles + b * bytes}, {strip.tiles + strip.tile_bytes + b * bytes}};
    if constexpr (ExpandedBlocks<type>::used)
      for (int tile = 0; tile < strip.tile_count; ++tile) blocks[tile].at = stored[tile].template next<kStripTokens>();
    for (int tile = 0; tile < strip.tile_count; ++tile) expanded[tile].read(blocks[tile]);
    for (int first = 0; first < layout.columns / kGroupColumns; first += together) {
      if constexpr (!ExpandedBlocks<type>::used) strip.fetch_ahead(b, bytes, 64 * lines * (first / together), lines);
      for (int i = 0; i < together * parts; ++i) {
        const int codes = (first * parts + i) * layout.unit() * kTileRows;
        zero_sums(strip.strips());
        add_products<true>(strip, x.codes + i * layout.unit(), strip.x_stride, expanded[0].codes + codes,
                           expanded[1].codes + codes);
        store_tiles(strip, products + i * kSumsTiles * kTileSums);
      }
      for (int s = 0; s < strip.strips(); ++s) {
        const int64_t rows = s * kStripTokens * strip.x_stride;
        const Columns of_strip = {x.codes + rows, x.scales + rows, x.sums32 + rows, x.sums16 + rows};
        for (int tile = 0; tile < strip.tile_count; ++tile) {
          const int at = (2 * s + tile) * kTileSums;
          add_scaled<type>(expanded[tile], blocks[tile], first, products + at, of_strip, group_sums + rows,
                           strip.x_stride, strip.strip_tokens(s), of_block + at, sums + at);
        }
      }
      x.skip(together);
    }
  }
  write_sums(strip, sums);
}

template <Type type>
void multiply_bytes(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                    int64_t tokens, float* y, int64_t y_stride) {
  constexpr BlockLayout layout = layout_of(type);
  ByteStrip strip{};
  strip.tile_bytes = matrix.tile_bytes;
  strip.blocks = (matrix.cols + layout.columns - 1) / layout.columns;
  strip.x_stride = x_stride;
  strip.padded = matrix.padded();
  strip.column = matrix.first_column;
  strip.y_stride = y_stride;
  strip.expand = expand_of<type>();
  strip.block_bytes = interleaved_of(type).bytes();
  const int64_t pairs = matrix.tile_bytes > 0 ? kTileBlockBytes / (2 * matrix.tile_bytes) : 1;
  const int64_t tile_block = pairs > 1 ? 2 * pairs : 2;
  int configured = 0;
  for (int64_t begin = tile_begin; begin < tile_end; begin += tile_block) {
    const int64_t end = begin + tile_block < tile_end ? begin + tile_block : tile_end;
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
      strip.tokens = static_cast<int>(tokens - token < kTokensAtOnce ? tokens - token : kTokensAtOnce);
      if (strip.tokens != configured) configure(configured = strip.tokens, layout.unit());
      strip.x = x + token * x_stride;
      strip.fetched = token == 0;
      for (int64_t tile = begin; tile < end; tile += 2) {
        const int64_t rows = matrix.rows - tile * kTileRows;
        strip.tiles = matrix.tiles + tile * matrix.tile_bytes;
        strip.tile_count = end - tile > 1 ? 2 : 1;
        strip.rows = static_cast<int>(rows < strip.tile_count * kTileRows ? rows : strip.tile_count * kTileRows);
        strip.y = y + token * y_stride + tile * kTileRows;
        byte_strip<form_of(type)>(strip);
      }
    }
  }
  if (configured) tile_release();
}

template <Type type>
void multiply_in_tiles(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                       int64_t tokens, float* y, int64_t y_stride) {
  if constexpr (type == Type::bf16) {
    const uint8_t* const at = x + ActivationRow::offset(ActivationFormat::bf16, matrix.first_column);
    multiply_bf16(matrix, tile_begin, tile_end, at, x_stride, tokens, y, y_stride);
  } else {
    const KernelTable& vectors = is_interleaved(type) ? avx512_vnni::interleaved_kernels : avx512_vnni::ordered_kernels;
    const auto product = tokens < kTilesFrom<type> ? vectors.of[static_cast<int>(type)].multiply : multiply_bytes<type>;
    product(matrix, tile_begin, tile_end, x, x_stride, tokens, y, y_stride);
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
