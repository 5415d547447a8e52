// Converts keys of a latent cache to values: pairs of dimensions become pairs of positions. Private to isa/.
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/integers.h"

namespace ckdist {
namespace CKDIST_ISA {

constexpr int kPairs = kBlockTokens / 2;  // pairs of dimensions in sixteen columns, and of positions in a block

// A pair of dimensions and a pair of positions are 64 bits: four codes. Exchanges the middle two.
[[maybe_unused]] CKDIST_INLINE uint64_t swap_middle(uint64_t x) {
  return (x & 0xFFFF00000000FFFFu) | (x & 0xFFFF0000u) << 16 | (x >> 16 & 0xFFFF0000u);
}

// key: (8, 16 positions, 2 dimensions); only `columns` / 2 rows exist. out: (8, 16 dimensions, 2 positions).
template <class Code>
CKDIST_INLINE void transpose_pairs(const uint8_t* key, int columns, int16_t* out) {
  const auto load_row = [&](int i) { return load_pairs(codes_at<Code>(key, i * 2 * kLanes)); };
#if defined(__AVX512F__)
  __m512i row[kPairs], half[kPairs], quarter[kPairs];
  for (int i = 0; i < kPairs; ++i) {
    const __m512i x = 2 * i < columns ? load_row(i).v : _mm512_setzero_si512();
    row[i] = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(x, 0xD8), 0xD8);
  }
  for (int i = 0; i < kPairs; i += 2) {  // positions of even and odd pairs, in 128-bit lanes
    half[i / 2] = _mm512_unpacklo_epi64(row[i], row[i + 1]);
    half[4 + i / 2] = _mm512_unpackhi_epi64(row[i], row[i + 1]);
  }
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i* const h = half + 4 * odd;
    quarter[0] = _mm512_shuffle_i64x2(h[0], h[1], 0x44), quarter[1] = _mm512_shuffle_i64x2(h[0], h[1], 0xEE);
    quarter[2] = _mm512_shuffle_i64x2(h[2], h[3], 0x44), quarter[3] = _mm512_shuffle_i64x2(h[2], h[3], 0xEE);
    for (int lane = 0; lane < 4; ++lane) {
      const __m512i a = quarter[lane / 2], b = quarter[2 + lane / 2];
      const __m512i pair = lane % 2 ? _mm512_shuffle_i64x2(a, b, 0xDD) : _mm512_shuffle_i64x2(a, b, 0x88);
      _mm512_storeu_si512(out + (2 * lane + odd) * 2 * kLanes, pair);
    }
  }
#elif defined(__AVX2__)
  for (int i = 0; i < kPairs; i += 4) {    // four pairs of dimensions
    for (int j = 0; j < kPairs; j += 4) {  // four pairs of positions
      __m256i row[4], half[4];
      for (int k = 0; k < 4; ++k) {
        const Ints x = 2 * (i + k) < columns ? load_row(i + k) : zeros();
        row[k] = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x.v[j / 4], 0xD8), 0xD8);
      }
      for (int k = 0; k < 2; ++k) {
        half[k] = _mm256_unpacklo_epi64(row[2 * k], row[2 * k + 1]);
        half[2 + k] = _mm256_unpackhi_epi64(row[2 * k], row[2 * k + 1]);
      }
      for (int k = 0; k < 4; ++k) {
        const __m256i a = half[k % 2 * 2], b = half[k % 2 * 2 + 1];
        const __m256i pair = k / 2 ? _mm256_permute2x128_si256(a, b, 0x31) : _mm256_permute2x128_si256(a, b, 0x20);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (j + k) * 2 * kLanes + i * 4), pair);
      }
    }
  }
#else
  for (int i = 0; i < kPairs; ++i) {
    int16_t codes[2 * kLanes] = {};
    if (2 * i < columns) store_pairs(codes, load_row(i));
    for (int j = 0; j < kPairs; ++j) {
      uint64_t four;
      std::memcpy(&four, codes + 4 * j, sizeof four);
      four = swap_middle(four);
      std::memcpy(out + j * 2 * kLanes + 4 * i, &four, sizeof four);
    }
  }
#endif
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
