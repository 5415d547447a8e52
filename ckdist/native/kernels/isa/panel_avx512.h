// Tiles of floats by several tokens at once: three tiles and eight tokens are 24 sums in registers for 11 loads per
// step, where one tile by sixteen tokens has 17 loads for 16 sums. Private to isa/.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels/isa/simd.h"
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kPanelTiles = 3, kPanelTokens = 8;
constexpr int kPanelSizes[4] = {1, 2, 4, kPanelTokens};

inline __m512 read_halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

#if defined(__AVX512BF16__)
constexpr bool kBf16Dot = true;
#else
constexpr bool kBf16Dot = false;  // bfloat16 weights are expanded, which is exact; activations are float32
#endif

// A word is the part of a token's activations in one product: a column, or two in bfloat16. A tile has 16 rows of
// words.
template <Type type>
constexpr int kWordColumns = type == Type::bf16 && kBf16Dot ? 2 : 1;
template <Type type>
constexpr int kVectorBytes = kWordColumns<type> * kTileRows * (type == Type::f32 ? 4 : 2);
template <Type type>
inline __m512i read_column(const uint8_t* tile, int word) {
  if constexpr (type == Type::f16) return _mm512_castps_si512(read_halves(tile + kVectorBytes<type> * word));
  if constexpr (type == Type::bf16 && !kBf16Dot) {  // lower and upper halves of the same vector
    const __m512i pairs = _mm512_loadu_si512(tile + 64 * (word / 2));
    return word % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(pairs, 16);
  }
  return _mm512_loadu_si512(tile + kVectorBytes<type> * word);
}

template <Type type>
inline __m512 multiply_add(__m512 sum, __m512i weights, __m512i x) {
#if defined(__AVX512BF16__)
  if constexpr (type == Type::bf16)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x));
#endif
  return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sum);
}

// `words` steps of `tiles` tiles by `tokens` tokens, whose words are `step` bytes apart. `result` receives the sums:
// take(token, tile, rows, sum) for every tile; the last tile has `last` rows. It has fetch(token, tile) for the
// beginning and ahead() for every step.
template <Type type, int tiles, int tokens, int step, class Result>
void panel(const uint8_t* tile, int64_t tile_bytes, const uint8_t* x, int64_t x_stride, int64_t words, int last,
           const Result& given) {
  Result result = given;  // a local copy stays in registers, because no store can change it
  __m512 sums[tokens][tiles];
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) {
      sums[t][i] = _mm512_setzero_ps();
      result.fetch(t, i);
    }
  constexpr int run = type == Type::bf16 && !kBf16Dot ? 2 : 1;  // words at once; `words` is a multiple of it
  for (const uint8_t* const end = tile + kVectorBytes<type> * words; tile < end;
       tile += run * kVectorBytes<type>, x += run * step) {
    result.ahead();
#pragma GCC unroll 2
    for (int w = 0; w < run; ++w) {
      __m512i weights[tiles];
#pragma GCC unroll 3
      for (int i = 0; i < tiles; ++i) weights[i] = read_column<type>(tile + i * tile_bytes, w);
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) {
        int32_t bits;
        std::memcpy(&bits, x + t * x_stride + w * step, sizeof bits);
#pragma GCC unroll 3
        for (int i = 0; i < tiles; ++i)
          sums[t][i] = multiply_add<type>(sums[t][i], weights[i], _mm512_set1_epi32(bits));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) result.take(t, i, i == tiles - 1 ? last : kTileRows, Vec{sums[t][i]});
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
