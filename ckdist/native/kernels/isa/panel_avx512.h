// Tiles of floats against several tokens at once: three tiles and eight tokens are 24 sums in registers for 11 loads a step, where one tile
// against sixteen tokens takes 17 loads for 16. Private to isa/.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kPanelTiles = 3, kPanelTokens = 8;

inline __m512 read_halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }

// One vector of weights: 16 rows of one column, of two in bfloat16.
template <Type type>
constexpr int kVectorBytes = type == Type::f16 ? 32 : 64;
template <Type type>
inline __m512i read_column(const uint8_t* tile, int index) {
  if constexpr (type == Type::f16) return _mm512_castps_si512(read_halves(tile + kVectorBytes<type> * index));
  return _mm512_loadu_si512(tile + kVectorBytes<type> * index);
}

template <Type type>
inline __m512 multiply_add(__m512 sum, __m512i weights, __m512i x) {
  if constexpr (type == Type::bf16) return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x));
  return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sum);
}

// `words` steps of `tiles` tiles against `tokens` tokens, whose words are `step` bytes apart. `result` takes the sums: take(token, tile, rows, sum)
// of every tile, of whose rows `last` exist in the last, after a fetch(token, tile) at the beginning and an ahead() in every step.
template <Type type, int tiles, int tokens, int step, class Result>
void panel(const uint8_t* tile, int64_t tile_bytes, const uint8_t* x, int64_t x_stride, int64_t words, int last, const Result& given) {
  Result result = given;  // in registers, as no store can change it
  __m512 sums[tokens][tiles];
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) {
      sums[t][i] = _mm512_setzero_ps();
      result.fetch(t, i);
    }
  for (const uint8_t* const end = tile + kVectorBytes<type> * words; tile < end; tile += kVectorBytes<type>, x += step) {
    result.ahead();
    __m512i weights[tiles];
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) weights[i] = read_column<type>(tile + i * tile_bytes, 0);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      int32_t bits;
      std::memcpy(&bits, x + t * x_stride, sizeof bits);
#pragma GCC unroll 3
      for (int i = 0; i < tiles; ++i) sums[t][i] = multiply_add<type>(sums[t][i], weights[i], _mm512_set1_epi32(bits));
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) result.take(t, i, i == tiles - 1 ? last : kTileRows, sums[t][i]);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
