// Sixteen float lanes of the ISA that the file is compiled for: one 512-bit register, two of 256 bits, or four of 128.
//
// Private to isa/. Every kernel is written once over `Vec`; only this file differs by ISA. Functions are inlined, so
// that no copy for a wider ISA can be linked into a narrower one. A file that needs only vectors is compiled once for
// all levels that have them (CKDIST_VECTORS). A file that needs an additional instruction is compiled for each level
// that has it (CKDIST_ISA), and uses the functions of the others. A sum of products is always written as fma(), never
// left to the compiler's contraction, so that two instances of one template give the same bits.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in gcc 12's own headers, for intentionally undefined values
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "core/read_as.h"
#include "kernels/half.h"

#define CKDIST_INLINE static inline __attribute__((always_inline))
#define CKDIST_INLINED __attribute__((always_inline))  // of a lambda
#if defined(CKDIST_NEON)
#include "kernels/isa/simd_neon.h"
#endif

namespace ckdist {
namespace CKDIST_VECTORS {}
namespace CKDIST_ISA {
using namespace CKDIST_VECTORS;
}

namespace CKDIST_VECTORS {

constexpr int kLanes = 16;

// Conversions of one number to and from IEEE binary16, rounded to nearest even.
CKDIST_INLINE float from_f16(uint16_t half) {
#if defined(__AVX2__)
  return _cvtsh_ss(half);
#elif defined(CKDIST_NEON)
  __fp16 x;  // a function cannot return it
  std::memcpy(&x, &half, 2);
  return x;
#else
  return float_of_half(half);
#endif
}
CKDIST_INLINE uint16_t to_f16(float x) {
#if defined(__AVX2__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CKDIST_NEON)
  const __fp16 half = static_cast<__fp16>(x);
  return read_as<uint16_t>(&half);
#else
  return half_of_float(x);
#endif
}

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

CKDIST_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
CKDIST_INLINE Vec load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
CKDIST_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
CKDIST_INLINE void store_n(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
CKDIST_INLINE Vec set(float x) { return {_mm512_set1_ps(x)}; }
CKDIST_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
CKDIST_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
CKDIST_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
CKDIST_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
CKDIST_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
CKDIST_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
CKDIST_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }                  // returns b if either is NaN
CKDIST_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }                  // returns b if either is NaN
CKDIST_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
CKDIST_INLINE Vec truncate(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)};
}  // |a| < 2^31
CKDIST_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
CKDIST_INLINE Vec select(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }
CKDIST_INLINE Mask lanes_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }  // lane l: bit l
CKDIST_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(magnitude.v), _mm512_castps_si512(sign.v),
                                                        _mm512_set1_epi32(INT32_MIN), 0xD8))};  // sign bit from `sign`
}
// a * 2^n. n is in the low mantissa bits of `power`. The result must be a normal number.
CKDIST_INLINE Vec add_exponent(Vec a, Vec power) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(power.v), 23)))};
}
CKDIST_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
CKDIST_INLINE Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Rounds to bfloat16, nearest even, in the upper half of every lane; NaN stays NaN. The lower half is undefined.
CKDIST_INLINE __m512i round_bf16(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v),
                odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x00400000));
}
CKDIST_INLINE Vec rounded_to_bf16(Vec a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(round_bf16(a), _mm512_set1_epi32(-0x10000)))};
}
CKDIST_INLINE __m256i to_bf16(Vec a) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));  // treats denormals as zero
#else
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(a), 16));
#endif
}
// The lanes of a, then those of b.
CKDIST_INLINE __m512i to_bf16(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(a)), to_bf16(b), 1);
#endif
}
// Each 32-bit lane: bits of a in the lower half, bits of b in the upper half.
CKDIST_INLINE Vec to_bf16_pairs(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order = _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(kLanes)), 16));
  return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, to_bf16(a, b)))};
#else
  const __m512i upper = _mm512_and_si512(round_bf16(b), _mm512_set1_epi32(-0x10000));
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(round_bf16(a), 16), upper))};
#endif
}
// The same if no lane is NaN. Denormals become zeros, as in the CPUs' own conversion. `flushed`: there are no
// denormals.
template <bool flushed>
CKDIST_INLINE Vec numbers_to_bf16_pairs(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  return to_bf16_pairs(a, b);
#else
  const __m512i low = _mm512_castps_si512(a.v), high = _mm512_castps_si512(b.v), one = _mm512_set1_epi16(1),
                half = _mm512_set1_epi32(-0x10000);
  const __m512i upper = _mm512_ternarylogic_epi32(half, high, _mm512_srli_epi32(low, 16), 0xCA);
  const __m512i lower = _mm512_ternarylogic_epi32(half, _mm512_slli_epi32(high, 16), low, 0xCA);
  const __m512i odd =
      _mm512_ternarylogic_epi32(lower, upper, one, 0xF8);  // lower | (upper & 1): rounds up if more than half
  const __m512i rounded = _mm512_add_epi16(upper, _mm512_srli_epi16(_mm512_subs_epu16(odd, one), 15));
  if constexpr (flushed) return {_mm512_castsi512_ps(rounded)};
  const __mmask32 normal = _mm512_test_epi16_mask(upper, _mm512_set1_epi16(0x7f80));
  return {_mm512_castsi512_ps(
      _mm512_mask_blend_epi16(normal, _mm512_and_si512(upper, _mm512_set1_epi16(INT16_MIN)), rounded))};
#endif
}
CKDIST_INLINE bool any_nan(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  (void)a, (void)b;
  return false;  // the instruction keeps them
#else
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q) != 0;
#endif
}
CKDIST_INLINE void store_bf16(uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
// 32 numbers in bfloat16: those at even indices in one Vec, those at odd indices in the other.
CKDIST_INLINE void load_pairs_bf16(const uint16_t* p, Vec* even, Vec* odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)));
}
// Denormals become zeros, as in the CPUs' own conversion.
CKDIST_INLINE Vec flush(Vec a) {
#if defined(__AVX512BF16__)
  return a;
#else
  const __mmask16 small = _mm512_testn_epi32_mask(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7f800000));
  return {_mm512_castsi512_ps(
      _mm512_mask_and_epi32(_mm512_castps_si512(a.v), small, _mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MIN)))};
#endif
}
CKDIST_INLINE Vec load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
CKDIST_INLINE void store_f16(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// Rounds to nearest even; |a| <= 127.
CKDIST_INLINE void store_i8(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Transposes a block of 16 x 16.
CKDIST_INLINE void transpose(Vec (&tile)[kLanes]) {
  __m512 pairs[kLanes], fours[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(tile[i].v, tile[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(tile[i].v, tile[i + 1].v);
  }
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + j + 2]);
      fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {  // fours[4 a + i]: rows 4 a .. 4 a + 3 of the columns i, 4 + i, 8 + i, 12 + i
    const __m512 a = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88),
                 b = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xDD),
                 d = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xDD);
    tile[i].v = _mm512_shuffle_f32x4(a, b, 0x88);
    tile[8 + i].v = _mm512_shuffle_f32x4(a, b, 0xDD);
    tile[4 + i].v = _mm512_shuffle_f32x4(c, d, 0x88);
    tile[12 + i].v = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
}
CKDIST_INLINE float reduce_sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
CKDIST_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }

#else

#if defined(__AVX2__)

using Part = __m256;
using PartMask = __m256;
constexpr int kPartLanes = 8;

CKDIST_INLINE Part part_load(const float* p) { return _mm256_loadu_ps(p); }
CKDIST_INLINE void part_store(float* p, Part a) { _mm256_storeu_ps(p, a); }
CKDIST_INLINE Part part_set(float x) { return _mm256_set1_ps(x); }
CKDIST_INLINE Part part_fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
CKDIST_INLINE Part part_fnma(Part a, Part b, Part c) { return _mm256_fnmadd_ps(a, b, c); }
CKDIST_INLINE Part part_min(Part a, Part b) { return _mm256_min_ps(a, b); }
CKDIST_INLINE Part part_max(Part a, Part b) { return _mm256_max_ps(a, b); }
CKDIST_INLINE Part part_truncate(Part a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
CKDIST_INLINE PartMask part_less(Part a, Part b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
CKDIST_INLINE Part part_select(PartMask m, Part a, Part b) { return _mm256_blendv_ps(b, a, m); }
CKDIST_INLINE Part part_copy_sign(Part magnitude, Part sign) {
  const Part bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
CKDIST_INLINE Part part_add_exponent(Part a, Part power) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(power), 23)));
}
CKDIST_INLINE Part part_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CKDIST_INLINE Part part_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
CKDIST_INLINE Part part_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
CKDIST_INLINE void part_store_f16(uint16_t* p, Part a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
CKDIST_INLINE __m256i part_round_bf16(Part a) {
  const __m256i bits = _mm256_castps_si256(a),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
CKDIST_INLINE void part_load_pairs(const uint16_t* p, Part* even, Part* odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)));
}
CKDIST_INLINE Part part_pairs(Part a, Part b) {
  return _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_srli_epi32(part_round_bf16(a), 16), part_round_bf16(b), 0xaa));
}
// Upper halves are 16-bit integers. They are incremented if the lower half is more than 1/2, or is 1/2 and the upper
// half is odd.
template <bool flushed>
CKDIST_INLINE Part part_number_pairs(Part a, Part b) {
  const __m256i low = _mm256_castps_si256(a), high = _mm256_castps_si256(b), one = _mm256_set1_epi16(1);
  const __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa),
                lower = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
  const __m256i odd = _mm256_or_si256(lower, _mm256_and_si256(upper, one));
  const __m256i rounded = _mm256_add_epi16(upper, _mm256_srli_epi16(_mm256_subs_epu16(odd, one), 15));
  if constexpr (flushed) return _mm256_castsi256_ps(rounded);
  const __m256i small = _mm256_cmpeq_epi16(_mm256_and_si256(upper, _mm256_set1_epi16(0x7f80)), _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_srli_epi16(small, 1), rounded));
}
CKDIST_INLINE bool part_any_nan(Part a, Part b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0; }
CKDIST_INLINE Part part_rounded_to_bf16(Part a) {
  return _mm256_castsi256_ps(_mm256_and_si256(part_round_bf16(a), _mm256_set1_epi32(-0x10000)));
}
CKDIST_INLINE Part part_flush(Part a) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7f800000));
  const __m256 small = _mm256_castsi256_ps(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()));
  return _mm256_blendv_ps(a, _mm256_and_ps(a, _mm256_set1_ps(-0.0f)), small);
}
CKDIST_INLINE void part_store_i8(int8_t* p, Part a) {
  const __m256i wide = _mm256_cvtps_epi32(a);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

#elif !defined(CKDIST_NEON)  // simd_neon.h has its own

// The compiler's vector extensions: four lanes are one register on every 64-bit CPU.
typedef float Part __attribute__((vector_size(16)));
typedef int32_t PartMask __attribute__((vector_size(16)));
typedef uint32_t PartBits __attribute__((vector_size(16)));
constexpr int kPartLanes = 4;

CKDIST_INLINE Part part_load(const float* p) { return read_as<Part>(p); }
CKDIST_INLINE void part_store(float* p, Part a) { std::memcpy(p, &a, sizeof a); }
CKDIST_INLINE Part part_set(float x) { return Part{x, x, x, x}; }
CKDIST_INLINE Part part_fma(Part a, Part b, Part c) { return a * b + c; }
CKDIST_INLINE Part part_fnma(Part a, Part b, Part c) { return c - a * b; }
CKDIST_INLINE Part part_min(Part a, Part b) { return a < b ? a : b; }
CKDIST_INLINE Part part_max(Part a, Part b) { return a > b ? a : b; }
CKDIST_INLINE Part part_truncate(Part a) { return __builtin_convertvector(__builtin_convertvector(a, PartMask), Part); }
CKDIST_INLINE PartMask part_less(Part a, Part b) { return a < b; }
CKDIST_INLINE Part part_select(PartMask m, Part a, Part b) { return m ? a : b; }
CKDIST_INLINE Part part_copy_sign(Part magnitude, Part sign) {
  return (Part)(((PartBits)magnitude & 0x7fffffff) | ((PartBits)sign & 0x80000000));
}
CKDIST_INLINE Part part_add_exponent(Part a, Part power) { return (Part)((PartBits)a + ((PartBits)power << 23)); }
CKDIST_INLINE PartBits part_u16(const uint16_t* p) {
  typedef uint16_t Four __attribute__((vector_size(8)));
  return __builtin_convertvector(read_as<Four>(p), PartBits);
}
CKDIST_INLINE Part part_f16(const uint16_t* p) {
  const PartBits half = part_u16(p);
  const PartBits magnitude = (half & 0x7fff) << 13;                           // the exponent is too small by 112
  const PartBits special = (PartBits)(magnitude >= 0x0f800000) & 0x7f800000;  // infinity and NaN
  const Part scaled = (Part)magnitude * 0x1p112f;
  return (Part)((PartBits)scaled | special | ((half & 0x8000) << 16));
}
CKDIST_INLINE Part part_bf16(const uint16_t* p) { return (Part)(part_u16(p) << 16); }
CKDIST_INLINE Part part_i8(const int8_t* p) {
  typedef int8_t Four __attribute__((vector_size(4)));
  return __builtin_convertvector(__builtin_convertvector(read_as<Four>(p), PartMask), Part);
}
CKDIST_INLINE void part_store_f16(uint16_t* p, Part a) {
  for (int i = 0; i < kPartLanes; ++i) p[i] = to_f16(a[i]);
}
CKDIST_INLINE PartBits part_round_bf16(Part a) {
  const PartBits bits = (PartBits)a, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return a == a ? rounded : bits | 0x00400000;
}
CKDIST_INLINE void part_store_bf16(uint16_t* p, Part a) {
  typedef uint16_t Four __attribute__((vector_size(8)));
  const Four four = __builtin_convertvector(part_round_bf16(a) >> 16, Four);
  std::memcpy(p, &four, sizeof four);
}
CKDIST_INLINE void part_load_pairs(const uint16_t* p, Part* even, Part* odd) {
  PartBits pairs = read_as<PartBits>(p);
  *even = (Part)(pairs << 16), *odd = (Part)(pairs & 0xffff0000);
}
CKDIST_INLINE Part part_pairs(Part a, Part b) {
  return (Part)(part_round_bf16(a) >> 16 | (part_round_bf16(b) & 0xffff0000));
}
CKDIST_INLINE Part part_rounded_to_bf16(Part a) { return (Part)(part_round_bf16(a) & 0xffff0000); }
CKDIST_INLINE Part part_flush(Part a) {
  const PartBits bits = (PartBits)a;
  return (Part)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}
template <bool>
CKDIST_INLINE Part part_number_pairs(Part a, Part b) {
  return part_pairs(part_flush(a), part_flush(b));
}
CKDIST_INLINE bool part_any_nan(Part, Part) { return false; }  // part_number_pairs keeps them
CKDIST_INLINE void part_store_i8(int8_t* p, Part a) {
  for (int i = 0; i < kPartLanes; ++i) p[i] = static_cast<int8_t>(a[i] == a[i] ? __builtin_lrintf(a[i]) : 0);
}

#endif

constexpr int kParts = kLanes / kPartLanes;

struct Vec {
  Part v[kParts];
};
struct Mask {
  PartMask m[kParts];
};

#define CKDIST_EACH_PART(expression)                        \
  Vec out;                                                  \
  for (int i = 0; i < kParts; ++i) out.v[i] = (expression); \
  return out

CKDIST_INLINE Vec load(const float* p) { CKDIST_EACH_PART(part_load(p + i * kPartLanes)); }
CKDIST_INLINE Vec load_n(const float* p, int n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, 4 * n);
  return load(lanes);
}
CKDIST_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < kParts; ++i) part_store(p + i * kPartLanes, a.v[i]);
}
CKDIST_INLINE void store_n(float* p, Vec a, int n) {
  if (n == kLanes) return store(p, a);
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, 4 * n);
}
CKDIST_INLINE Vec set(float x) { CKDIST_EACH_PART(part_set(x)); }
CKDIST_INLINE Vec operator+(Vec a, Vec b) { CKDIST_EACH_PART(a.v[i] + b.v[i]); }
CKDIST_INLINE Vec operator-(Vec a, Vec b) { CKDIST_EACH_PART(a.v[i] - b.v[i]); }
CKDIST_INLINE Vec operator*(Vec a, Vec b) { CKDIST_EACH_PART(a.v[i] * b.v[i]); }
CKDIST_INLINE Vec operator/(Vec a, Vec b) { CKDIST_EACH_PART(a.v[i] / b.v[i]); }
CKDIST_INLINE Vec fma(Vec a, Vec b, Vec c) { CKDIST_EACH_PART(part_fma(a.v[i], b.v[i], c.v[i])); }    // a b + c
CKDIST_INLINE Vec fnma(Vec a, Vec b, Vec c) { CKDIST_EACH_PART(part_fnma(a.v[i], b.v[i], c.v[i])); }  // c - a b
CKDIST_INLINE Vec min(Vec a, Vec b) { CKDIST_EACH_PART(part_min(a.v[i], b.v[i])); }  // returns b if either is NaN
CKDIST_INLINE Vec max(Vec a, Vec b) { CKDIST_EACH_PART(part_max(a.v[i], b.v[i])); }  // returns b if either is NaN
CKDIST_INLINE Vec copy_sign(Vec a, Vec sign) { CKDIST_EACH_PART(part_copy_sign(a.v[i], sign.v[i])); }
CKDIST_INLINE Vec abs(Vec a) { return copy_sign(a, set(0.0f)); }
CKDIST_INLINE Vec truncate(Vec a) { CKDIST_EACH_PART(part_truncate(a.v[i])); }  // |a| < 2^31
CKDIST_INLINE Mask less(Vec a, Vec b) {
  Mask out;
  for (int i = 0; i < kParts; ++i) out.m[i] = part_less(a.v[i], b.v[i]);
  return out;
}
CKDIST_INLINE Vec select(Mask m, Vec a, Vec b) { CKDIST_EACH_PART(part_select(m.m[i], a.v[i], b.v[i])); }
CKDIST_INLINE Mask lanes_of(uint32_t bits) {  // lane l: bit l
  float lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = static_cast<float>(bits >> l & 1);
  return less(set(0.0f), load(lanes));
}
// a * 2^n. n is in the low mantissa bits of `power`. The result must be a normal number.
CKDIST_INLINE Vec add_exponent(Vec a, Vec power) { CKDIST_EACH_PART(part_add_exponent(a.v[i], power.v[i])); }
CKDIST_INLINE Vec load_f16(const uint16_t* p) { CKDIST_EACH_PART(part_f16(p + i * kPartLanes)); }
CKDIST_INLINE Vec load_bf16(const uint16_t* p) { CKDIST_EACH_PART(part_bf16(p + i * kPartLanes)); }
CKDIST_INLINE void store_bf16(uint16_t* p, Vec a) {
#if defined(__AVX2__)
  const __m256i low = _mm256_srli_epi32(part_round_bf16(a.v[0]), 16),
                high = _mm256_srli_epi32(part_round_bf16(a.v[1]), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#else
  for (int i = 0; i < kParts; ++i) part_store_bf16(p + i * kPartLanes, a.v[i]);
#endif
}
// 32 numbers in bfloat16: those at even indices in one Vec, those at odd indices in the other.
CKDIST_INLINE void load_pairs_bf16(const uint16_t* p, Vec* even, Vec* odd) {
  for (int i = 0; i < kParts; ++i) part_load_pairs(p + 2 * i * kPartLanes, even->v + i, odd->v + i);
}
// Each 32-bit lane: bits of a in the lower half, bits of b in the upper half.
CKDIST_INLINE Vec to_bf16_pairs(Vec a, Vec b) { CKDIST_EACH_PART(part_pairs(a.v[i], b.v[i])); }
// The same if no lane is NaN. Denormals become zeros, as in the CPUs' own conversion to bfloat16. `flushed`: there are
// no denormals.
template <bool flushed>
CKDIST_INLINE Vec numbers_to_bf16_pairs(Vec a, Vec b) {
  CKDIST_EACH_PART(part_number_pairs<flushed>(a.v[i], b.v[i]));
}
CKDIST_INLINE bool any_nan(Vec a, Vec b) {
  bool any = false;
  for (int i = 0; i < kParts; ++i) any |= part_any_nan(a.v[i], b.v[i]);
  return any;
}
CKDIST_INLINE Vec rounded_to_bf16(Vec a) { CKDIST_EACH_PART(part_rounded_to_bf16(a.v[i])); }
// Denormals become zeros, as in the CPUs' own conversion to bfloat16.
CKDIST_INLINE Vec flush(Vec a) { CKDIST_EACH_PART(part_flush(a.v[i])); }
CKDIST_INLINE Vec load_i8(const int8_t* p) { CKDIST_EACH_PART(part_i8(p + i * kPartLanes)); }

CKDIST_INLINE void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < kParts; ++i) part_store_f16(p + i * kPartLanes, a.v[i]);
}
// Rounds to nearest even; |a| <= 127.
CKDIST_INLINE void store_i8(int8_t* p, Vec a) {
  for (int i = 0; i < kParts; ++i) part_store_i8(p + i * kPartLanes, a.v[i]);
}

#if defined(__AVX2__)
// Transposes a block of 8 x 8.
CKDIST_INLINE void transpose_part(Part (&r)[kPartLanes]) {
  Part pairs[kPartLanes], fours[kPartLanes];
  for (int i = 0; i < kPartLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < kPartLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
    }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
  }
}
#endif

// Transposes a block of 16 x 16.
CKDIST_INLINE void transpose(Vec (&tile)[kLanes]) {
#if defined(__AVX2__)
  Part blocks[kParts][kParts][kPartLanes];
  for (int a = 0; a < kParts; ++a)
    for (int b = 0; b < kParts; ++b) {
      for (int i = 0; i < kPartLanes; ++i) blocks[a][b][i] = tile[a * kPartLanes + i].v[b];
      transpose_part(blocks[a][b]);
    }
  for (int a = 0; a < kParts; ++a)
    for (int b = 0; b < kParts; ++b)
      for (int i = 0; i < kPartLanes; ++i) tile[b * kPartLanes + i].v[a] = blocks[a][b][i];
#else
  float rows[kLanes][kLanes], columns[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(rows[i], tile[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) columns[j][i] = rows[i][j];
  for (int i = 0; i < kLanes; ++i) tile[i] = load(columns[i]);
#endif
}
CKDIST_INLINE float reduce_sum(Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
CKDIST_INLINE float reduce_max(Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

#endif

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
