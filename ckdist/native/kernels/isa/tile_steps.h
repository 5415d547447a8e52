// Steps of products in tiles of bfloat16, 32 columns each, with prefetches for later steps. Private to isa/.
#pragma once
#include "kernels/isa/tile_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kStepBytes = kTileRowBytes;                    // of a token's columns
constexpr int kWeightBytes = kTileMostRows * kTileRowBytes;  // of a tile's weights

// Two strips of 16 tokens and two tiles of weights. All distances are in bytes.
struct TileSteps {
  const uint8_t* weights;
  int64_t step_bytes, tile_bytes;  // from a step of weights, or a tile, to the next
  const uint8_t* x;
  int64_t x_bytes, strip_bytes, token_bytes;  // from a step of tokens, a strip or a token to the next
  int64_t count;

  void next() { weights += step_bytes, x += x_bytes, --count; }
};

// A share of the lines of memory in two places, to prefetch to the L2 cache: some in each step.
struct FetchTwo {
  const uint8_t* at;
  int64_t other, left;  // bytes from one place to the other; lines
  int each;

  // Share number `share` of `bytes` bytes in both places. `begin`: null for none.
  FetchTwo(const uint8_t* begin, int64_t to_other, int64_t bytes, int64_t share, int64_t shares, int64_t steps)
      : at(begin), other(to_other), left(0), each(0) {
    if (begin == nullptr) return;
    const int64_t lines = bytes / 64, first = lines * share / shares;
    at += 64 * first, left = lines * (share + 1) / shares - first, each = static_cast<int>((left + steps - 1) / steps);
  }
  void step() {
    for (int i = 0; i < each && left > 0; ++i, --left, at += 64) fetch_lines(at, 1), fetch_lines(at + other, 1);
  }
};

// Rows of a result that are written after the steps. They go to the L2 cache, since rows at a distance of some KB share
// few sets of the L1 cache.
struct FetchResult {
  static constexpr int kEach = 2;  // in a step
  const float* row;
  int64_t stride;
  int left;

  FetchResult(const TileStrip& strip, bool ends)
      : row(strip.y), stride(strip.y_stride), left(ends ? strip.tokens : 0) {}
  void step() {
    for (int i = 0; i < kEach && left > 0; ++i, --left, row += stride)
      __builtin_prefetch(row, 0, 2), __builtin_prefetch(row + kTileRows, 0, 2);
  }
};

// Adds the products of whole strips and two tiles. The tokens of a strip stay in the L1 cache for many tiles of
// weights, which are therefore streamed past it. One register holds both strips in turn. With all eight tiles in use, a
// core whose other thread is busy begins each instruction when the one before has ended: 130 ns for a step, and 90 with
// seven.
template <class... Fetch>
CKDIST_INLINE void add_steps(TileSteps at, Fetch... later) {
  constexpr int a = kActivationTile, b = kWeightTile;
  for (; at.count > 0; at.next()) {
    (later.step(), ...);
    tile_load<a>(at.x, at.token_bytes);
    tile_stream<b>(at.weights, kTileRowBytes);
    tile_stream<b + 1>(at.weights + at.tile_bytes, kTileRowBytes);
    tile_dot_bf16<0, a, b>();
    tile_dot_bf16<1, a, b + 1>();
    tile_load<a>(at.x + at.strip_bytes, at.token_bytes);
    tile_dot_bf16<2, a, b>();
    tile_dot_bf16<3, a, b + 1>();
  }
}

// The same for any number of tokens and tiles.
inline void add_some_steps(const TileStrip& strip, TileSteps at) {
  for (; at.count > 0; at.next())
    add_products<false>(strip, at.x, at.token_bytes, at.weights, at.weights + at.tile_bytes, at.strip_bytes);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
