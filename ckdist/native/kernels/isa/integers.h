// Sixteen int32 lanes, like the sixteen floats of simd.h, and their product: pairs of int16, summed into a lane.
// Integer sums are exact, so any order of additions gives the same bits. Private to isa/.
#pragma once
#include "kernels/isa/simd.h"

#if !defined(__AVX2__) && defined(__SSE2__)
#include <emmintrin.h>
#elif defined(CKDIST_NEON)
#include "kernels/isa/integers_neon.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

// A pair of codes of 4 bits (see attention_block.h).
struct Nibbles {
  uint8_t pair;
};
template <class Code>
constexpr int kPairBytes = 2 * sizeof(Code);
template <>
constexpr int kPairBytes<Nibbles> = 1;
// Loads of sixteen pairs that share a cache line.
template <class Code>
constexpr int kLoadsPerLine = 4 / kPairBytes<Code>;
// The codes from number `index` on, which is even.
template <class Code>
CKDIST_INLINE const Code* codes_at(const uint8_t* codes, int64_t index) {
  return reinterpret_cast<const Code*>(codes + index / 2 * kPairBytes<Code>);
}
// Code number `index`.
CKDIST_INLINE int16_t code_of(const int16_t* codes, int64_t index) { return codes[index]; }
CKDIST_INLINE int16_t code_of(const int8_t* codes, int64_t index) { return codes[index]; }
CKDIST_INLINE int16_t code_of(const Nibbles* codes, int64_t index) {
  const int half = codes[index / 2].pair >> (index % 2 ? 4 : 0) & 15;
  return static_cast<int16_t>(2 * (half < 8 ? half : half - 16) + 1);
}

#if defined(__AVX512F__)

struct Ints {
  __m512i v;
};

CKDIST_INLINE Ints zeros() { return {_mm512_setzero_si512()}; }
// 32 codes, two in each lane.
CKDIST_INLINE Ints load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
CKDIST_INLINE Ints load_pairs(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// The byte of a pair comes to the upper half of both words. Shifts keep the sign, and the last bit is 1 in all codes.
CKDIST_INLINE Ints load_pairs(const Nibbles* p) {
  alignas(64) static constexpr uint8_t kSpread[64] = {
      128, 0,  128, 0,  128, 1,  128, 1,  128, 2,  128, 2,  128, 3,  128, 3,  128, 4,  128, 4,  128, 5,
      128, 5,  128, 6,  128, 6,  128, 7,  128, 7,  128, 8,  128, 8,  128, 9,  128, 9,  128, 10, 128, 10,
      128, 11, 128, 11, 128, 12, 128, 12, 128, 13, 128, 13, 128, 14, 128, 14, 128, 15, 128, 15};
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i words = _mm512_sllv_epi16(_mm512_shuffle_epi8(bytes, _mm512_load_si512(kSpread)), _mm512_set1_epi32(4));
  return {_mm512_or_si512(_mm512_srai_epi16(words, 11), _mm512_set1_epi16(1))};
}
CKDIST_INLINE void store_pairs(int16_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
CKDIST_INLINE Ints set_pair(const int16_t* p) { return {_mm512_set1_epi32(read_as<int32_t>(p))}; }
// vpdpwssd is written by hand: GCC 12 copies every sum in a loop, and stores some.
CKDIST_INLINE Ints dot(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
CKDIST_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounds to nearest even, |a| <= 32767. Lane i is the pair (even[i], odd[i]), which must not be negative; and sixteen
// consecutive numbers.
CKDIST_INLINE Ints round_pairs(Vec even, Vec odd) {
  return {_mm512_or_si512(_mm512_cvtps_epi32(even.v), _mm512_slli_epi32(_mm512_cvtps_epi32(odd.v), 16))};
}
CKDIST_INLINE void store_i16(int16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

#elif defined(__AVX2__) || defined(__SSE2__)

#if defined(__AVX2__)
using IntPart = __m256i;
#define CKDIST_INTEGER(name) _mm256_##name
#define CKDIST_INTEGER_BITS(name) _mm256_##name##_si256
#else
using IntPart = __m128i;
#define CKDIST_INTEGER(name) _mm_##name
#define CKDIST_INTEGER_BITS(name) _mm_##name##_si128
#endif

struct Ints {
  IntPart v[kParts];
};

#define CKDIST_EACH_INTS(expression)                        \
  Ints out;                                                 \
  for (int i = 0; i < kParts; ++i) out.v[i] = (expression); \
  return out

CKDIST_INLINE Ints zeros() { CKDIST_EACH_INTS(CKDIST_INTEGER_BITS(setzero)()); }
CKDIST_INLINE Ints load_pairs(const int16_t* p) {
  CKDIST_EACH_INTS(CKDIST_INTEGER_BITS(loadu)(reinterpret_cast<const IntPart*>(p + 2 * kPartLanes * i)));
}
CKDIST_INLINE Ints load_pairs(const int8_t* p) {
#if defined(__AVX2__)
  CKDIST_EACH_INTS(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i))));
#else
  Ints out;
  for (int i = 0; i < kParts; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
    out.v[i] = _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
  }
  return out;
#endif
}
// The byte of a pair comes to the upper half of both words. Shifts keep the sign, and the last bit is 1 in all codes.
CKDIST_INLINE Ints load_pairs(const Nibbles* p) {
  Ints out;
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX2__)
    const __m256i spread = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,  //
                                            -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + kPartLanes * i));
    const IntPart words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), spread);
#else
    int32_t four = read_as<int32_t>(p + kPartLanes * i);
    const __m128i bytes = _mm_cvtsi32_si128(four), twice = _mm_unpacklo_epi8(bytes, bytes);
    const IntPart words = _mm_unpacklo_epi16(twice, twice);
#endif
    const IntPart shifted = CKDIST_INTEGER(mullo_epi16)(words, CKDIST_INTEGER(set1_epi32)(0x10010));
    out.v[i] = CKDIST_INTEGER_BITS(or)(CKDIST_INTEGER(srai_epi16)(shifted, 11), CKDIST_INTEGER(set1_epi16)(1));
  }
  return out;
}
CKDIST_INLINE void store_pairs(int16_t* p, Ints a) {
  for (int i = 0; i < kParts; ++i)
    CKDIST_INTEGER_BITS(storeu)(reinterpret_cast<IntPart*>(p + 2 * kPartLanes * i), a.v[i]);
}
CKDIST_INLINE Ints set_pair(const int16_t* p) {
  int32_t pair = read_as<int32_t>(p);
  CKDIST_EACH_INTS(CKDIST_INTEGER(set1_epi32)(pair));
}
CKDIST_INLINE Ints dot(Ints sum, Ints a, Ints b) {
#if defined(__AVXVNNI__)
  for (int i = 0; i < kParts; ++i) asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.v[i]) : "x"(a.v[i]), "x"(b.v[i]));
  return sum;
#else
  CKDIST_EACH_INTS(CKDIST_INTEGER(add_epi32)(sum.v[i], CKDIST_INTEGER(madd_epi16)(a.v[i], b.v[i])));
#endif
}
CKDIST_INLINE Vec to_floats(Ints a) { CKDIST_EACH_PART((Part)CKDIST_INTEGER(cvtepi32_ps)(a.v[i])); }
CKDIST_INLINE Ints round_pairs(Vec even, Vec odd) {
  CKDIST_EACH_INTS(CKDIST_INTEGER_BITS(or)(CKDIST_INTEGER(cvtps_epi32)(even.v[i]),
                                           CKDIST_INTEGER(slli_epi32)(CKDIST_INTEGER(cvtps_epi32)(odd.v[i]), 16)));
}
CKDIST_INLINE void store_i16(int16_t* p, Vec a) {
  for (int i = 0; i < kParts; i += 2) {
    IntPart words =
        CKDIST_INTEGER(packs_epi32)(CKDIST_INTEGER(cvtps_epi32)(a.v[i]), CKDIST_INTEGER(cvtps_epi32)(a.v[i + 1]));
#if defined(__AVX2__)
    words = _mm256_permute4x64_epi64(words, 0xD8);  // packing interleaves the 128-bit halves
#endif
    CKDIST_INTEGER_BITS(storeu)(reinterpret_cast<IntPart*>(p + kPartLanes * i), words);
  }
}

#undef CKDIST_INTEGER
#undef CKDIST_INTEGER_BITS

#elif !defined(CKDIST_NEON)  // integers_neon.h has its own

struct Ints {
  PartMask v[kParts];
};

CKDIST_INLINE Ints zeros() { return {}; }
CKDIST_INLINE Ints load_pairs(const int16_t* p) { return read_as<Ints>(p); }
CKDIST_INLINE void store_pairs(int16_t* p, Ints a) { std::memcpy(p, &a, sizeof a); }
CKDIST_INLINE Ints load_pairs(const int8_t* p) {
  int16_t codes[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) codes[i] = p[i];
  return load_pairs(codes);
}
CKDIST_INLINE Ints load_pairs(const Nibbles* p) {
  int16_t codes[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) codes[i] = code_of(p, i);
  return load_pairs(codes);
}
CKDIST_INLINE Ints set_pair(const int16_t* p) {
  int16_t codes[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) codes[i] = p[i % 2];
  return load_pairs(codes);
}
CKDIST_INLINE Ints dot(Ints sum, Ints a, Ints b) {
  int16_t x[2 * kLanes], y[2 * kLanes];
  store_pairs(x, a);
  store_pairs(y, b);
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = int32_t{x[2 * i]} * y[2 * i] + int32_t{x[2 * i + 1]} * y[2 * i + 1];
  Ints products = read_as<Ints>(lanes);
  for (int i = 0; i < kParts; ++i) sum.v[i] += products.v[i];
  return sum;
}
CKDIST_INLINE Vec to_floats(Ints a) { CKDIST_EACH_PART(__builtin_convertvector(a.v[i], Part)); }
CKDIST_INLINE void store_i16(int16_t* p, Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(lanes[i] == lanes[i] ? __builtin_lrintf(lanes[i]) : 0);
}
CKDIST_INLINE Ints round_pairs(Vec even, Vec odd) {
  int16_t e[kLanes], o[kLanes], pairs[2 * kLanes];
  store_i16(e, even);
  store_i16(o, odd);
  for (int i = 0; i < kLanes; ++i) pairs[2 * i] = e[i], pairs[2 * i + 1] = o[i];
  return load_pairs(pairs);
}

#endif

}  // namespace CKDIST_ISA
}  // namespace ckdist
