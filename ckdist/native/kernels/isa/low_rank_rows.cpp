#include "kernels/low_rank_rows.h"

#include "kernels/isa/simd.h"
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kTogether = 4;
constexpr int64_t kLine = 64, kAhead = 4096;  // bytes of a cache line, and of the tiles between a fetch and its use
template <bool halves>
constexpr int64_t kBlockBytes = int64_t{kFloatColumnPad} * kTileRows * (halves ? 2 : 4);

template <bool halves, int count>
CKDIST_INLINE void dots(const uint8_t* const* tiles, const float* const* x, int64_t cols, Vec* sums) {
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) sums[i] = set(0.0f);
  const int64_t padded = (cols + kFloatColumnPad - 1) / kFloatColumnPad * kFloatColumnPad;
  for (int64_t block = 0; block < padded; block += kFloatColumnPad) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i)
#pragma GCC unroll 4
      for (int64_t line = 0; line < kBlockBytes<halves>; line += kLine)
        __builtin_prefetch(tiles[i] + block / kFloatColumnPad * kBlockBytes<halves> + kAhead + line);
#pragma GCC unroll 4
    for (int64_t c = block; c < block + kFloatColumnPad; ++c)
#pragma GCC unroll 4
      for (int i = 0; i < count; ++i) {
        const Vec weights = halves ? load_f16(reinterpret_cast<const uint16_t*>(tiles[i]) + c * kLanes)
                                   : load(reinterpret_cast<const float*>(tiles[i]) + c * kLanes);
        sums[i] = fma(weights, set(x[i][c]), sums[i]);
      }
  }
}

template <bool halves, int count>
CKDIST_INLINE void multiply_some(const TileProduct* products, int64_t cols) {
  const uint8_t* tiles[count];
  const float* x[count];
  Vec sums[count];
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) tiles[i] = products[i].tile, x[i] = products[i].x;
  dots<halves, count>(tiles, x, cols, sums);
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) store(products[i].y, sums[i]);
}

template <bool halves>
void multiply_all(const TileProduct* products, int64_t count, int64_t cols) {
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) multiply_some<halves, kTogether>(products + i, cols);
  for (; i + 2 <= count; i += 2) multiply_some<halves, 2>(products + i, cols);
  if (i < count) multiply_some<halves, 1>(products + i, cols);
}

template <bool halves, int count>
CKDIST_INLINE void add_some(const uint8_t* tile, int64_t tile_bytes, int64_t rows, int64_t cols, const float* row,
                            float* y) {
  const uint8_t* tiles[count];
  const float* x[count];
  Vec sums[count];
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) tiles[i] = tile + i * tile_bytes, x[i] = row;
  dots<halves, count>(tiles, x, cols, sums);
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) {
    float* const at = y + i * kLanes;
    const int lanes = rows - i * kLanes < kLanes ? static_cast<int>(rows - i * kLanes) : kLanes;
    if (lanes == kLanes) store(at, load(at) + sums[i]);
    else store_n(at, load_n(at, lanes) + sums[i], lanes);
  }
}

template <bool halves>
void add_all(const uint8_t* tiles, int64_t tile_bytes, int64_t rows, int64_t cols, const float* x, float* y) {
  for (; rows > (kTogether - 1) * kLanes; rows -= kTogether * kLanes) {
    add_some<halves, kTogether>(tiles, tile_bytes, rows, cols, x, y);
    tiles += kTogether * tile_bytes, y += kTogether * kLanes;
  }
  for (; rows > 0; rows -= kLanes, tiles += tile_bytes, y += kLanes)
    add_some<halves, 1>(tiles, tile_bytes, rows, cols, x, y);
}

void multiply(bool halves, const TileProduct* products, int64_t count, int64_t cols) {
  halves ? multiply_all<true>(products, count, cols) : multiply_all<false>(products, count, cols);
}

void add(bool halves, const uint8_t* tiles, int64_t tile_bytes, int64_t rows, int64_t cols, const float* x, float* y) {
  halves ? add_all<true>(tiles, tile_bytes, rows, cols, x, y) : add_all<false>(tiles, tile_bytes, rows, cols, x, y);
}

}  // namespace

extern const LowRankKernel low_rank_kernel = {multiply, add};

}  // namespace CKDIST_ISA
}  // namespace ckdist
