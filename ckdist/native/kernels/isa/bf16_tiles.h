// Products of bfloat16 with AMX for rows in place: few tokens, and experts. Tiles handle every number of tokens,
// because their order of additions differs from that of vectors. They are 32 columns deep.
//
// For up to 32 tokens, a block has 1,024 columns. For up to 16 tokens, it has all columns: weights are fastest from
// memory in one stretch. Two tiles of weights at a time are multiplied by a block. Between two blocks of
// columns the sums are stored in memory, so that they are added in the order of columns for any block size. Blocks of
// 256 columns, whose activations stay in the L1 cache, were slower on 16 cores by 7 to 19 %: their sums pass the L2
// cache four times as often.
//
// Weights from memory take longer than the products of about 80 tokens. So for more than 64 tokens each step prefetches
// a part of the next block's weights, to keep memory busy during the products of later tokens. Private to isa/.
#pragma once
#include <cstring>

#include "kernels/isa/tile_steps.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kBlockBytes = 64 << 10;              // bytes of 32 tokens' activations in a block
constexpr int64_t kNearTokens = 64;                // up to this number, weights are prefetched only from near ahead
constexpr int kGroupPairs = 4, kGroupStrips = 16;  // 128 rows of weights by 512 tokens

// Rows of weights by tokens, whose sums (256 KB) stay in the L2 cache. `next`: the tiles that are read after these;
// null if these tiles are used for more tokens.
struct Bf16Group {
  const Matrix& matrix;
  int64_t tile_begin, tile_end, token, tokens;
  const uint8_t* next;
  float* y;  // sums of the first token and row 0 of the matrix
  int64_t y_stride;

  int64_t blocks() const { return (matrix.cols + 15) / 16; }
  int64_t steps() const { return (blocks() + 1) / 2; }
  const uint8_t* tiles() const { return matrix.tiles + tile_begin * matrix.tile_bytes; }
  // The memory to prefetch during the products with the block that ends with step `end`; null: none.
  const uint8_t* after(int64_t end) const {
    if (end == steps()) return next;
    return token == 0 ? tiles() + end * kWeightBytes : nullptr;
  }
};

// Multiplies steps [first, first + steps) of the columns of two tiles and adds to the sums in the tiles. `fetched`: the
// weights come from memory.
inline void bf16_steps(const TileStrip& strip, const uint8_t* tiles, int64_t tile_bytes, int64_t blocks, int64_t first,
                       int64_t steps, const uint8_t* x, int64_t x_stride, bool fetched, FetchTwo later) {
  const uint8_t *one = tiles + first * kWeightBytes, *two = one + (strip.tile_count - 1) * tile_bytes;
  const int64_t whole = blocks / 2 - first < steps ? blocks / 2 - first : steps;
  constexpr int64_t near = kNear / kWeightBytes;  // steps
  for (int64_t s = 0; s < whole; ++s, one += kWeightBytes, two += kWeightBytes, x += kStepBytes) {
    // After the last step, the next ones are the first of the following tiles.
    const int64_t ahead = kNear + (s + near < whole ? 0 : strip.tile_count * tile_bytes - whole * kWeightBytes);
    if (fetched) fetch_lines(one + ahead, kWeightBytes / 64), fetch_lines(two + ahead, kWeightBytes / 64);
    later.step();
    add_products<false>(strip, x, x_stride, one, two);
  }
  if (whole == steps) return;
  // Columns beyond the last are zero on both sides.
  alignas(64) uint8_t ends[2][kWeightBytes] = {}, x_ends[kTokensAtOnce][kStepBytes] = {};
  std::memcpy(ends[0], one, kWeightBytes / 2);
  std::memcpy(ends[1], two, kWeightBytes / 2);
  for (int t = 0; t < strip.tokens; ++t) std::memcpy(x_ends[t], x + t * x_stride, kStepBytes / 2);
  add_products<false>(strip, x_ends[0], kStepBytes, ends[0], ends[1]);
}

inline void bf16_group(const Bf16Group& group, const uint8_t* x, int64_t x_stride, int& configured) {
  alignas(64) float sums[kGroupStrips][kGroupPairs][kSumsTiles * kTileSums];
  const int widest = static_cast<int>(group.tokens < kTokensAtOnce ? group.tokens : kTokensAtOnce);
  const int64_t all = group.steps(), tile_bytes = group.matrix.tile_bytes;
  const int64_t block = widest <= kStripTokens ? all : kBlockBytes / (widest * kStepBytes);
  const bool far = group.tokens > kNearTokens;
  const int64_t strips = (group.tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  int64_t first = 0;
  do {
    const int64_t steps = all - first < block ? all - first : block;
    const uint8_t* const after = far ? group.after(first + steps) : nullptr;
    for (int64_t token = 0; token < group.tokens; token += kTokensAtOnce) {
      TileStrip strip{};
      strip.tokens = static_cast<int>(group.tokens - token < kTokensAtOnce ? group.tokens - token : kTokensAtOnce);
      if (strip.tokens != configured) configure(configured = strip.tokens, kTileRowBytes);
      const uint8_t* const of_strip = x + (group.token + token) * x_stride + first * kStepBytes;
      const bool fetched = group.token + token == 0 && !(far && first > 0);
      for (int64_t tile = group.tile_begin; tile < group.tile_end; tile += 2) {
        const int64_t at = (tile - group.tile_begin) * tile_bytes;
        float* const wait = block < all ? sums[token / kTokensAtOnce][(tile - group.tile_begin) / 2] : sums[0][0];
        const int64_t left = group.matrix.rows - tile * kTileRows;
        strip.tile_count = group.tile_end - tile > 1 ? 2 : 1;
        strip.rows = static_cast<int>(left < strip.tile_count * kTileRows ? left : strip.tile_count * kTileRows);
        // A block of both tiles, divided evenly over the strips. Additional lines would evict others.
        const FetchTwo later(after ? after + at : nullptr, (strip.tile_count - 1) * tile_bytes, block * kWeightBytes,
                             token / kTokensAtOnce, strips, steps);
        if (first) load_tiles(strip, wait);
        else zero_sums(strip.strips());
        bf16_steps(strip, group.tiles() + at, tile_bytes, group.blocks(), first, steps, of_strip, x_stride, fetched,
                   later);
        strip.y = group.y + (group.token + token) * group.y_stride + tile * kTileRows;
        strip.y_stride = group.y_stride;
        const bool last = first + steps == all;
        if (last && strip.whole()) {
          store_sums(strip);
          continue;
        }
        store_tiles(strip, wait);
        if (last) write_sums(strip, wait);
      }
    }
    first += steps;
  } while (first < all);
}

// y[t * y_stride + row] = dot(matrix[row], x[t]) for the rows of tiles [tile_begin, tile_end). x_stride: an odd number
// of cache lines.
inline void multiply_bf16(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x,
                          int64_t x_stride, int64_t tokens, float* y, int64_t y_stride) {
  int configured = 0;
  constexpr int64_t tiles = 2 * kGroupPairs, group_tokens = kGroupStrips * kTokensAtOnce;
  for (int64_t tile = tile_begin; tile < tile_end; tile += tiles) {
    const int64_t end = tile_end - tile < tiles ? tile_end : tile + tiles;
    for (int64_t token = 0; token < tokens; token += group_tokens) {
      const int64_t left = tokens - token;
      const uint8_t* const next = left > group_tokens ? nullptr : matrix.tiles + end * matrix.tile_bytes;
      bf16_group({matrix, tile, end, token, left < group_tokens ? left : group_tokens, next, y, y_stride}, x, x_stride,
                 configured);
    }
  }
  if (configured) tile_release();
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
