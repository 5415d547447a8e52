// The codes and scales of a block of a tile, in vectors of kPartRows rows, for every level with vectors. Private to
// isa/.
#pragma once
#include "kernels/half.h"
#if defined(CKDIST_NEON)
#include "kernels/isa/dot_neon.h"
#else
#include "kernels/isa/dot.h"
#endif
#if defined(__AVX512F__)
#include "kernels/isa/panel_avx512.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#if defined(__AVX512F__)

constexpr int kPartRows = 16;
using CodePart = __m512i;
using IntPart = __m512i;
using FloatPart = __m512;

inline __m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline __m512i widen(const uint8_t* bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline __m512i widen_signed(const uint8_t* bytes) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline __m512i widen_halves(const uint8_t* at) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline __m512i look_up(const uint8_t* book, __m512i codes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(book));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), codes);
}
// The top two bits of each byte of three vectors, the first lowest.
template <class Words>
inline __m512i join_top_bits(Words first, Words second, Words third) {
  constexpr int select = 0xca;  // bits of the first operand select the second or the third
  const __m512i low =
      _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x03), (__m512i)(first >> 6), (__m512i)(second >> 4), select);
  const __m512i all = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), low, (__m512i)(third >> 2), select);
  return _mm512_and_si512(all, _mm512_set1_epi8(0x3f));
}
// 2^(e - 128). The two smallest values are subnormal numbers.
inline __m512i power_of_two(__m512i e) {
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  return _mm512_mask_sllv_epi32(normal, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)),
                                _mm512_set1_epi32(kLeastPower), e);
}

#elif defined(__AVX2__)

constexpr int kPartRows = 8;
using CodePart = __m256i;
using IntPart = __m256i;
using FloatPart = __m256;

inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline __m256 read_halves(const uint8_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline __m128i read_bytes(const uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }
inline __m256i widen(const uint8_t* bytes) { return _mm256_cvtepu8_epi32(read_bytes(bytes)); }
inline __m256i widen_signed(const uint8_t* bytes) { return _mm256_cvtepi8_epi32(read_bytes(bytes)); }
inline __m256i widen_halves(const uint8_t* at) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline __m256i look_up(const uint8_t* book, __m256i codes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(book));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), codes);
}
// The top two bits of each byte of three vectors, the first lowest.
template <class Words>
inline __m256i join_top_bits(Words first, Words second, Words third) {
  return (__m256i)((first >> 6 & 0x0303030303030303u) | (second >> 4 & 0x0c0c0c0c0c0c0c0cu) |
                   (third >> 2 & 0x3030303030303030u));
}
inline __m256i power_of_two(__m256i e) {
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  return _mm256_blendv_epi8(normal, _mm256_sllv_epi32(_mm256_set1_epi32(kLeastPower), e),
                            _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e));
}

#else

constexpr int kPartRows = 4;
using CodePart = int8x16_t;
using IntPart = int32x4_t;
using FloatPart = float32x4_t;

inline int32x4_t load(const uint8_t* at) { return vreinterpretq_s32_u8(vld1q_u8(at)); }
inline float32x4_t read_halves(const uint8_t* at) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))); }
inline int32x4_t as_ints(float32x4_t v) { return vreinterpretq_s32_f32(v); }
inline float32x4_t as_floats(int32x4_t v) { return vreinterpretq_f32_s32(v); }

inline uint8x8_t read_four(const uint8_t* at) { return vreinterpret_u8_u32(vdup_n_u32(read_as<uint32_t>(at))); }
inline int32x4_t widen(const uint8_t* bytes) {
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(read_four(bytes)))));
}
inline int32x4_t widen_signed(const uint8_t* bytes) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(read_four(bytes)))));
}
inline int32x4_t widen_halves(const uint8_t* at) {
  return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(at))));
}
inline int8x16_t look_up(const uint8_t* book, int8x16_t codes) {
  return vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(book), vreinterpretq_u8_s8(codes)));
}
// The top two bits of each byte of three vectors, the first lowest.
template <class Words>
inline int8x16_t join_top_bits(Words first, Words second, Words third) {
  const uint8x16_t low = vshrq_n_u8((uint8x16_t)first, 6),
                   middle = vandq_u8(vshrq_n_u8((uint8x16_t)second, 4), vdupq_n_u8(0x0c)),
                   high = vandq_u8(vshrq_n_u8((uint8x16_t)third, 2), vdupq_n_u8(0x30));
  return vreinterpretq_s8_u8(vorrq_u8(vorrq_u8(low, middle), high));
}
inline int32x4_t power_of_two(int32x4_t e) {
  const int32x4_t normal = vshlq_n_s32(vsubq_s32(e, vdupq_n_s32(1)), 23);
  return vbslq_s32(vcltq_s32(e, vdupq_n_s32(2)), vshlq_s32(vdupq_n_s32(kLeastPower), e), normal);
}

#endif

constexpr int kParts = kTileRows / kPartRows;
typedef uint64_t PartWords __attribute__((vector_size(4 * kPartRows)));
typedef int32_t PartInts __attribute__((vector_size(4 * kPartRows)));

// Shifts words left (right if negative). The caller must mask off the bits from the neighbouring byte.
template <int shift>
inline PartWords shifted(PartWords words) {
  if constexpr (shift < 0) return words >> -shift;
  else return words << shift;
}

constexpr uint64_t every_byte(int byte) { return 0x0101010101010101u * static_cast<uint64_t>(byte); }

// The codes of four columns, row after row.
template <Type type, int step>
inline CodePart read_step(const uint8_t* planes) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int low_parts = 8 / layout.low_bits;
  constexpr int vector = layout.low_bits == 4 ? step % 4 : step / low_parts;
  constexpr int shift = layout.low_bits * (layout.low_bits == 4 ? step / 4 : step % low_parts);
  const auto words = [planes](int at) { return (PartWords)load(planes + at); };
  if constexpr (layout.low_bits == 6) {
    constexpr int three = 192 * (step / 4);
    if constexpr (step % 4 < 3) return (CodePart)(words(three + 64 * (step % 4)) & every_byte(0x3f));
    else return join_top_bits(words(three), words(three + 64), words(three + 128));
  } else {
    PartWords codes = words(64 * vector);
    if constexpr (layout.low_bits < 8) codes = shifted<-shift>(codes) & every_byte((1 << layout.low_bits) - 1);
    if constexpr (layout.high_bits > 0) {
      constexpr int high_parts = 8 / layout.high_bits;
      const PartWords high = shifted<layout.low_bits - layout.high_bits*(step % high_parts)>(
          words(layout.low_bytes() + 64 * (step / high_parts)));
      codes |= high & every_byte(((1 << layout.high_bits) - 1) << layout.low_bits);
    }
    if constexpr (layout.codebook) codes = (PartWords)look_up(codebook_of(type), (CodePart)codes);
    if constexpr (is_signed<type>()) codes ^= every_byte(kCodebookOffset);
    return (CodePart)codes;
  }
}

// A part of a block of a tile: kPartRows rows. Groups are numbered within it. Scales are integers or floats, as the
// layout defines.
template <Type type>
struct Block {
  static constexpr BlockLayout layout = layout_of(type);
  const uint8_t* at;
  int part = 0;

  int offset(int bytes) const { return kParts > 1 ? part * bytes : 0; }  // `bytes`: those of a part
  // Planes of the columns-th 32 columns.
  const uint8_t* planes(int columns) const {
    return at + layout.planes() + columns * layout.plane_bytes() + offset(4 * kPartRows);
  }
  FloatPart block_scale() const {
    if constexpr (layout.scales == ScaleKind::expanded || layout.scales == ScaleKind::float8)
      return (FloatPart)load(at + layout.block_scale() + offset(4 * kPartRows));
    else return read_halves(at + layout.block_scale() + offset(2 * kPartRows));
  }
  FloatPart block_minimum() const { return read_halves(at + layout.block_minimum() + offset(2 * kPartRows)); }
  const uint8_t* byte_minima() const { return at + layout.group_minima() + offset(4 * kPartRows); }
  static IntPart product(FloatPart factor, PartInts bytes) {
    return (IntPart)(factor * (FloatPart) __builtin_convertvector(bytes, FloatPart));
  }

  IntPart scale(int group) const {
    const uint8_t* scales = at + layout.group_scales() + layout.scale_of(group) * layout.group_scale_bytes() +
                            offset(layout.group_scale_bytes() / kParts);
    if constexpr (layout.scales == ScaleKind::half) return (IntPart)read_halves(scales);
    else if constexpr (layout.scales == ScaleKind::bfloat) return (IntPart)((PartInts)widen_halves(scales) << 16);
    else if constexpr (layout.scales == ScaleKind::zeroed)
      return (IntPart)((PartInts)load(scales) & ~int32_t(kZeroPoint));
    else if constexpr (layout.scales == ScaleKind::unsigned_byte) return widen(scales);
    else if constexpr (layout.scales == ScaleKind::exponent) return power_of_two(widen(scales));
    else if constexpr (layout.scales == ScaleKind::float8)
      return (IntPart)(block_scale() * (FloatPart)((PartInts)widen(scales) << kScaleShift));
    else if constexpr (layout.scales == ScaleKind::signed_byte || layout.scales == ScaleKind::expanded)
      return widen_signed(scales);
    else return product(block_scale(), (PartInts)widen(scales) & 0x0f);
  }

  IntPart minimum(int group) const {
    if constexpr (layout.scales == ScaleKind::half) {
      const uint8_t* minima = at + layout.group_minima() + group * layout.group_scale_bytes();
      return (IntPart)read_halves(minima + offset(2 * kPartRows));
    } else if constexpr (layout.scales == ScaleKind::zeroed) {
      const uint8_t* scales = at + layout.group_scales() + layout.scale_of(group) * layout.group_scale_bytes();
      const PartInts zero = (PartInts)load(scales + offset(4 * kPartRows)) & int32_t(kZeroPoint);
      return product((FloatPart)scale(group), zero);
    } else {
      const uint8_t* bytes = at + layout.group_scales() + group * kTileRows + offset(kPartRows);
      return product(block_minimum(), (PartInts)widen(bytes) >> 4);
    }
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
