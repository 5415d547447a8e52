// A tile of floats by several tokens at once: six tokens are twelve sums in registers, for two loads of weights and six
// of activations per step. Private to isa/.
#pragma once
#include <immintrin.h>

#include "kernels/isa/simd.h"
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kPanelTiles = 1, kPanelTokens = 6;
constexpr int kPanelSizes[4] = {1, 2, 4, kPanelTokens};

// The same as in panel_avx512.h.
template <Type type, int tiles, int tokens, int step, class Result>
void panel(const uint8_t* tile, int64_t, const uint8_t* x, int64_t x_stride, int64_t words, int last,
           const Result& given) {
  static_assert(type == Type::f32 && tiles == 1 && kParts == 2);
  Result result = given;
  Vec sums[tokens];
#pragma GCC unroll 6
  for (int t = 0; t < tokens; ++t) sums[t] = set(0.0f), result.fetch(t, 0);
  for (const uint8_t* const end = tile + 64 * words; tile < end; tile += 64, x += step) {
    result.ahead();
    const __m256 top = _mm256_loadu_ps(reinterpret_cast<const float*>(tile)),
                 bottom = _mm256_loadu_ps(reinterpret_cast<const float*>(tile) + 8);
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t) {
      const __m256 value = _mm256_broadcast_ss(reinterpret_cast<const float*>(x + t * x_stride));
      sums[t].v[0] = _mm256_fmadd_ps(top, value, sums[t].v[0]);
      sums[t].v[1] = _mm256_fmadd_ps(bottom, value, sums[t].v[1]);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < tokens; ++t) result.take(t, 0, last, sums[t]);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
