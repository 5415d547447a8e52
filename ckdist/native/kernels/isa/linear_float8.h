// Strips of 8-bit floats: the same code over the vectors of every level. Private to isa/.
#pragma once
#include "kernels/isa/float8.h"
#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

template <Type type, int tokens, bool expanded>
void float8_columns(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int steps = kSummedColumns / 4, runs = layout.columns / kSummedColumns;
  constexpr int step_bytes = (expanded ? 2 : 1) * kPairLine;
  constexpr int block_bytes = expanded ? kExpandedFloat8<type> : layout.bytes();
  constexpr int codes_at = expanded ? kExpandedScales : layout.planes();
  Lane sums[kSplits][tokens];
  for (auto& of_split : sums)
    for (Lane& sum : of_split) sum = zero_lane();
  const uint8_t *block = strip.tile, *x = strip.x;
  for (int64_t b = 0; b < strip.blocks; ++b, block += block_bytes) {
    const uint8_t* at = block + codes_at;
    for (int run = 0; run < runs; ++run, at += steps * step_bytes, x += kSummedColumns * kColumnBytes) {
      if constexpr (!expanded) fetch<type, tokens>(at, steps);
#pragma GCC unroll 4
      for (int s = 0; s < kSplits; ++s) {
        Lane part[tokens];
        for (Lane& sum : part) sum = zero_lane();
#pragma GCC unroll 8
        for (int step = 0; step < steps; ++step)
          add_four<tokens, expanded>(at + step * step_bytes + kWordBytes * s, x + 4 * step * kColumnBytes,
                                     strip.x_stride, part);
        const Lane scale = load_lane(block + kWordBytes * s);
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) sums[s][t] = add_product(sums[s][t], part[t], scale);
      }
    }
  }
  for (int s = 0; s < kSplits; ++s)
    for (int t = 0; t < tokens; ++t)
      store_lane(strip.y + t * strip.y_stride + kLaneRows * s, sums[s][t], strip.rows - kLaneRows * s);
}

template <Type type, int tokens>
void float8_strip(const Strip& strip) {
  if (strip.expand) float8_columns<type, tokens, false>(strip);
  else float8_columns<type, tokens, true>(strip);
}

template <Type type>
struct Float8Product {
  static constexpr Type kType = type;
  static constexpr int kBlockColumns = layout_of(type).columns;

  template <int tokens>
  static constexpr StripFunction of() {
    return {tokens, 1, float8_strip<type, tokens>};
  }
  static StripFunction strip(int64_t tokens, int64_t) {
#if defined(__AVX512F__)
    if (tokens >= 16) return of<16>();
    if (tokens >= 8) return of<8>();
#endif
    return tokens >= 4 ? of<4>() : tokens == 3 ? of<3>() : tokens == 2 ? of<2>() : of<1>();
  }
};

#if defined(__AVX512BF16__)
static_assert(kFormats.float8_pairs);
#else
static_assert(!kFormats.float8_pairs);
#endif

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
