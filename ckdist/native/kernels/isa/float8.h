// 8-bit floats (E4M3): conversion of codes to float32, or to pairs of bfloat16, both exact; blocks expanded to such
// pairs; and strips over either. Private to isa/.
//
// A sum runs over a few columns and is then scaled, so that its additions do not wait for one another: 32 columns of
// pairs, 16 of floats. The order is the same for any number of tokens.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 emits it for its own undefined vectors
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(CKDIST_NEON)
#include <arm_neon.h>
#endif

#include <cstring>

#include "kernels/half.h"
#include "kernels/layout.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// An expanded block: the packed scales, then [pair of columns][16 rows][2] of bfloat16.
constexpr int kExpandedScales = 4 * kTileRows, kPairLine = 4 * kTileRows;
template <Type type>
constexpr int kExpandedFloat8 = kExpandedScales + layout_of(type).columns / 2 * kPairLine;
constexpr float kTwoTo120 = 0x1p120f;

// Bit offset in a word of the code of column `column` of four.
constexpr int place_of(int column) { return 8 * (column == 1 ? 2 : column == 2 ? 1 : column); }

// Lanes are rows. A word of a lane has the codes of four columns.
#if defined(__AVX512F__)

constexpr int kLaneRows = 16;
using Lane = __m512;
using LaneBits = __m512i;
inline LaneBits load_bits(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline void store_bits(uint8_t* at, LaneBits v) { _mm512_storeu_si512(at, v); }
inline Lane load_lane(const uint8_t* at) { return _mm512_loadu_ps(at); }
inline Lane zero_lane() { return _mm512_setzero_ps(); }
inline Lane every(const uint8_t* at) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return _mm512_set1_ps(value);
}
inline Lane add_product(Lane sum, Lane a, Lane b) { return _mm512_fmadd_ps(a, b, sum); }
// A code's magnitude, shifted to a float's position, is the value * 2^-120. Subnormal codes become subnormal floats.
template <int column>
inline Lane floats_of(LaneBits words) {
  const LaneBits bits = _mm512_and_si512(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - place_of(column)), 4),
                                         _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kTwoTo120));
}
inline LaneBits bf16_pair(Lane first, Lane second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                 _mm512_castps_si512(second));
}
template <int place>
inline Lane of_pair(LaneBits pair) {
  return _mm512_castsi512_ps(place ? _mm512_and_si512(pair, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(pair, 16));
}

#elif defined(__AVX2__)

constexpr int kLaneRows = 8;
using Lane = __m256;
using LaneBits = __m256i;
inline LaneBits load_bits(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline void store_bits(uint8_t* at, LaneBits v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), v); }
inline Lane load_lane(const uint8_t* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
inline Lane zero_lane() { return _mm256_setzero_ps(); }
inline Lane every(const uint8_t* at) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(at)); }
inline Lane add_product(Lane sum, Lane a, Lane b) { return _mm256_fmadd_ps(a, b, sum); }
template <int column>
inline Lane floats_of(LaneBits words) {
  const LaneBits bits = _mm256_and_si256(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - place_of(column)), 4),
                                         _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(kTwoTo120));
}
inline LaneBits bf16_pair(Lane first, Lane second) {
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(first), 16), _mm256_castps_si256(second), 0xaa);
}
template <int place>
inline Lane of_pair(LaneBits pair) {
  return _mm256_castsi256_ps(place ? _mm256_and_si256(pair, _mm256_set1_epi32(-0x10000)) : _mm256_slli_epi32(pair, 16));
}

#elif defined(CKDIST_NEON)

constexpr int kLaneRows = 4;
using Lane = float32x4_t;
using LaneBits = uint32x4_t;
inline LaneBits load_bits(const uint8_t* at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }
inline void store_bits(uint8_t* at, LaneBits v) { vst1q_u8(at, vreinterpretq_u8_u32(v)); }
inline Lane load_lane(const uint8_t* at) { return vreinterpretq_f32_u8(vld1q_u8(at)); }
inline Lane zero_lane() { return vdupq_n_f32(0.0f); }
inline Lane every(const uint8_t* at) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return vdupq_n_f32(value);
}
inline Lane add_product(Lane sum, Lane a, Lane b) { return vfmaq_f32(sum, a, b); }
template <int column>
inline Lane floats_of(LaneBits words) {
  const int32x4_t high = vreinterpretq_s32_u32(vshlq_u32(words, vdupq_n_s32(24 - place_of(column))));
  const uint32x4_t bits = vandq_u32(vreinterpretq_u32_s32(vshrq_n_s32(high, 4)), vdupq_n_u32(0x87f00000u));
  return vmulq_n_f32(vreinterpretq_f32_u32(bits), kTwoTo120);
}
inline LaneBits bf16_pair(Lane first, Lane second) {
  return vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(first), 16),
                   vandq_u32(vreinterpretq_u32_f32(second), vdupq_n_u32(0xffff0000u)));
}
template <int place>
inline Lane of_pair(LaneBits pair) {
  return vreinterpretq_f32_u32(place ? vandq_u32(pair, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(pair, 16));
}

#else

constexpr int kLaneRows = 1;
using Lane = float;
using LaneBits = uint32_t;
inline LaneBits load_bits(const uint8_t* at) {
  uint32_t words;
  std::memcpy(&words, at, sizeof words);
  return words;
}
inline void store_bits(uint8_t* at, LaneBits v) { std::memcpy(at, &v, sizeof v); }
inline Lane load_lane(const uint8_t* at) { return float_of_bits(load_bits(at)); }
inline Lane zero_lane() { return 0.0f; }
inline Lane every(const uint8_t* at) { return load_lane(at); }
inline Lane add_product(Lane sum, Lane a, Lane b) { return sum + a * b; }
template <int column>
inline Lane floats_of(LaneBits words) {
  return float_of_e4m3(static_cast<uint8_t>(words >> place_of(column)));
}
inline LaneBits bf16_pair(Lane first, Lane second) {
  return bits_of_float(first) >> 16 | (bits_of_float(second) & 0xffff0000u);
}
template <int place>
inline Lane of_pair(LaneBits pair) {
  return float_of_bits(place ? pair & 0xffff0000u : pair << 16);
}

#endif

constexpr int kSplits = kTileRows / kLaneRows;
constexpr int kWordBytes = 4 * kLaneRows;  // bytes of a word of all lanes

#if defined(__AVX512BF16__)

constexpr int kSummedColumns = 32;
// Converts codes in the low bytes of 16-bit lanes to bfloat16. The exponent's bias grows by 120. Subnormal codes are
// looked up, because no shift can normalize them.
inline __m512i bf16_of(__m512i codes) {
  const __m512i subnormal = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                             0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0);
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)),
                                                      magnitude, subnormal);
  constexpr int insert = 0xec;  // (a & c) | b: the sign
  return _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 8), value, _mm512_set1_epi16(-0x8000), insert);
}
inline void pairs_of(__m512i words, __m512i& first, __m512i& second) {
  first = bf16_of(_mm512_and_si512(words, _mm512_set1_epi16(0xff)));
  second = bf16_of(_mm512_srli_epi16(words, 8));
}
inline Lane add_pairs(Lane sum, __m512i pairs, const uint8_t* x) {
  int32_t two;
  std::memcpy(&two, x, sizeof two);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)));
}
constexpr int kColumnBytes = 2;  // bytes of an activation

#else

constexpr int kSummedColumns = 16;
constexpr int kColumnBytes = 4;
inline void pairs_of(LaneBits words, LaneBits& first, LaneBits& second) {
  first = bf16_pair(floats_of<0>(words), floats_of<1>(words));
  second = bf16_pair(floats_of<2>(words), floats_of<3>(words));
}

#endif

template <Type type>
void expand_float8(const uint8_t* packed, uint8_t* block) {
  std::memcpy(block, packed, kExpandedScales);
  const uint8_t* words = packed + layout_of(type).planes();
  uint8_t* to = block + kExpandedScales;
  for (int step = 0; step < layout_of(type).columns / 4; ++step, words += kPairLine, to += 2 * kPairLine)
#pragma GCC unroll 4
    for (int s = 0; s < kSplits; ++s) {
      LaneBits first, second;
      pairs_of(load_bits(words + kWordBytes * s), first, second);
      store_bits(to + kWordBytes * s, first);
      store_bits(to + kPairLine + kWordBytes * s, second);
    }
}

// Adds four columns to the sums of a few tokens. `at`: a packed word of each row, or two expanded pairs.
template <int tokens, bool expanded>
inline void add_four(const uint8_t* at, const uint8_t* x, int64_t x_stride, Lane* sums) {
#if defined(__AVX512BF16__)
  LaneBits first, second;
  if constexpr (expanded) first = load_bits(at), second = load_bits(at + kPairLine);
  else pairs_of(load_bits(at), first, second);
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = add_pairs(sums[t], first, x + t * x_stride);
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = add_pairs(sums[t], second, x + t * x_stride + 4);
#else
  Lane weights[4];
  if constexpr (expanded) {
    const LaneBits first = load_bits(at), second = load_bits(at + kPairLine);
    weights[0] = of_pair<0>(first), weights[1] = of_pair<1>(first);
    weights[2] = of_pair<0>(second), weights[3] = of_pair<1>(second);
  } else {
    const LaneBits words = load_bits(at);
    weights[0] = floats_of<0>(words), weights[1] = floats_of<1>(words);
    weights[2] = floats_of<2>(words), weights[3] = floats_of<3>(words);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c)
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) sums[t] = add_product(sums[t], weights[c], every(x + t * x_stride + 4 * c));
#endif
}

inline void store_lane(float* at, Lane lane, int rows) {
  float values[kLaneRows];
  std::memcpy(values, &lane, sizeof values);
  if (rows > 0) std::memcpy(at, values, static_cast<size_t>(rows < kLaneRows ? rows : kLaneRows) * sizeof(float));
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
