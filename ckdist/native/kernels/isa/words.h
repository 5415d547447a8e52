// Words of 32 bits, one from each row of a tile that a register has room for, to interleave stored rows. Private to
// isa/.
#pragma once
#include <cstdint>

#include "kernels/isa/simd.h"
#include "kernels/linear.h"

namespace ckdist {
namespace CKDIST_VECTORS {

#if defined(__AVX512F__)

constexpr int kWordRows = 16;
typedef uint32_t Words __attribute__((vector_size(64)));

CKDIST_INLINE void store(uint8_t* p, Words a) { _mm512_storeu_si512(p, (__m512i)a); }
// Bits of a if the mask has a one, else bits of b.
CKDIST_INLINE Words merge(uint32_t mask, Words a, Words b) {
  return (Words)_mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), (__m512i)a, (__m512i)b, 0xCA);
}
CKDIST_INLINE void store_low_halves(uint8_t* p, Words a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)a));
}
// Stores byte g of every word at p + g * kTileRows.
CKDIST_INLINE void store_bytes(uint8_t* p, Words a) {
  const __m512i byte_of_fours = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(fours, _mm512_shuffle_epi8((__m512i)a, byte_of_fours)));
}

// Loads four words (16 bytes) of every fourth row, one row per lane.
CKDIST_INLINE __m512i load_rows(const uint8_t* const* rows, int64_t at) {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4 * i] + at)); };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, row(2), 2), row(3), 3);
}
#define CKDIST_UNPACK(name, a, b) _mm512_unpack##name(a, b)

#elif defined(CKDIST_NEON)

constexpr int kWordRows = 4;
typedef uint32_t Words __attribute__((vector_size(16)));

CKDIST_INLINE void store(uint8_t* p, Words a) { vst1q_u8(p, (uint8x16_t)a); }
CKDIST_INLINE Words merge(uint32_t mask, Words a, Words b) {
  return (Words)vbslq_u32(vdupq_n_u32(mask), (uint32x4_t)a, (uint32x4_t)b);
}
CKDIST_INLINE void store_low_halves(uint8_t* p, Words a) { vst1_u8(p, vreinterpret_u8_u16(vmovn_u32((uint32x4_t)a))); }
CKDIST_INLINE void store_bytes(uint8_t* p, Words a) {
  const uint8x16_t byte_of_fours = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const Words bytes = (Words)vqtbl1q_u8((uint8x16_t)a, byte_of_fours);
  for (int g = 0; g < 4; ++g) {
    const uint32_t four = bytes[g];
    std::memcpy(p + g * kTileRows, &four, 4);
  }
}

CKDIST_INLINE uint32x4_t load_rows(const uint8_t* const* rows, int64_t at) {
  return vreinterpretq_u32_u8(vld1q_u8(rows[0] + at));
}
CKDIST_INLINE uint32x4_t unpacklo_epi32(uint32x4_t a, uint32x4_t b) { return vzip1q_u32(a, b); }
CKDIST_INLINE uint32x4_t unpackhi_epi32(uint32x4_t a, uint32x4_t b) { return vzip2q_u32(a, b); }
CKDIST_INLINE uint32x4_t unpacklo_epi64(uint32x4_t a, uint32x4_t b) {
  return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}
CKDIST_INLINE uint32x4_t unpackhi_epi64(uint32x4_t a, uint32x4_t b) {
  return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}
#define CKDIST_UNPACK(name, a, b) unpack##name(a, b)

#else

constexpr int kWordRows = 8;
typedef uint32_t Words __attribute__((vector_size(32)));

CKDIST_INLINE void store(uint8_t* p, Words a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)a); }
CKDIST_INLINE Words merge(uint32_t mask, Words a, Words b) { return (a & mask) | (b & ~mask); }
CKDIST_INLINE void store_low_halves(uint8_t* p, Words a) {
  const __m256i halves =
      _mm256_packus_epi32(_mm256_and_si256((__m256i)a, _mm256_set1_epi32(0xffff)), _mm256_setzero_si256());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
}
CKDIST_INLINE void store_bytes(uint8_t* p, Words a) {
  const __m256i byte_of_fours =
      _mm256_setr_epi32(0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703, 0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)a, byte_of_fours),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), low);
  _mm_storeh_pd(reinterpret_cast<double*>(p + kTileRows), _mm_castsi128_pd(low));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 2 * kTileRows), high);
  _mm_storeh_pd(reinterpret_cast<double*>(p + 3 * kTileRows), _mm_castsi128_pd(high));
}

CKDIST_INLINE __m256i load_rows(const uint8_t* const* rows, int64_t at) {
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + at)));
  return _mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4] + at)), 1);
}
#define CKDIST_UNPACK(name, a, b) _mm256_unpack##name(a, b)

#endif

// Loads 16 * chunks bytes of every row from `at` on: out[i] is word i of all rows. No other bytes are read. Each row's
// bytes are read together, because rows at a distance of a power of two would evict each other from the cache.
template <int chunks>
CKDIST_INLINE void load_transposed(const uint8_t* const* rows, int64_t at, Words* out) {
  decltype(load_rows(rows, at)) fours[4][chunks];  // [i]: rows i, 4 + i, 8 + i, 12 + i, one per lane
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < chunks; ++c) fours[i][c] = load_rows(rows + i, at + 16 * c);
#pragma GCC unroll 4
  for (int c = 0; c < chunks; ++c) {
    const auto low01 = CKDIST_UNPACK(lo_epi32, fours[0][c], fours[1][c]),
               high01 = CKDIST_UNPACK(hi_epi32, fours[0][c], fours[1][c]);
    const auto low23 = CKDIST_UNPACK(lo_epi32, fours[2][c], fours[3][c]),
               high23 = CKDIST_UNPACK(hi_epi32, fours[2][c], fours[3][c]);
    out[4 * c] = (Words)CKDIST_UNPACK(lo_epi64, low01, low23);
    out[4 * c + 1] = (Words)CKDIST_UNPACK(hi_epi64, low01, low23);
    out[4 * c + 2] = (Words)CKDIST_UNPACK(lo_epi64, high01, high23);
    out[4 * c + 3] = (Words)CKDIST_UNPACK(hi_epi64, high01, high23);
  }
}
#undef CKDIST_UNPACK

// Loads the word at `at` of every row.
CKDIST_INLINE Words load_word(const uint8_t* const* rows, int64_t at) {
  Words out;
  for (int row = 0; row < kWordRows; ++row) {
    uint32_t word;
    std::memcpy(&word, rows[row] + at, 4);
    out[row] = word;
  }
  return out;
}

// Copies the float16 at `at` of every row, with the bits of `flip` inverted.
CKDIST_INLINE void copy_halves(const uint8_t* const* rows, int64_t at, uint8_t* p, uint16_t flip = 0) {
  for (int row = 0; row < kWordRows; ++row) {
    uint16_t half;
    std::memcpy(&half, rows[row] + at, 2);
    half ^= flip;
    std::memcpy(p + 2 * row, &half, 2);
  }
}

// Fields of `bits` bits within bytes, 8 / bits in each: field f of word i becomes field i of word f.
template <int bits>
CKDIST_INLINE void turn_fields(Words* w) {
  constexpr int count = 8 / bits;
  constexpr uint32_t low_of_two[5] = {0, 0x55555555, 0x33333333, 0, 0x0f0f0f0f};
#pragma GCC unroll 3
  for (int step = 1; step < count; step *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      if (i & step) continue;
      const Words a = w[i], b = w[i + step];
      w[i] = merge(low_of_two[bits * step], a, b << (bits * step));
      w[i + step] = merge(low_of_two[bits * step], a >> (bits * step), b);
    }
}

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
