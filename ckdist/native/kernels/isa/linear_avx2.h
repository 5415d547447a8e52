// Strips with AVX2 and FMA: 16 rows in two vectors ("halves"), byte products by maddubs, whose 16-bit pair sums must not
// saturate. Codes of up to 6 bits leave room to add a few of them before widening; full bytes are multiplied as
// |weight| * (activation with the weight's sign). bfloat16 weights are expanded, which is exact.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kSteps = kGroupColumns / 4;
constexpr int kLane = 8;  // rows of a half
constexpr int kHalves = kTileRows / kLane;

template <Type type>
constexpr ActivationFormat activation_of() {
  return layout_of(type).columns ? ActivationFormat::q8 : ActivationFormat::f32;
}

inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Lanes of half `half` that are rows of the tile.
inline __m256i row_mask(const Strip& strip, int half) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kLane * half));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(strip.rows), lane);
}

template <int tokens>
inline void store_sums(const Strip& strip, const __m256 (*sums)[kHalves]) {
  for (int h = 0; h < kHalves; ++h)
    for (int t = 0; t < tokens; ++t) _mm256_maskstore_ps(strip.y + t * strip.y_stride + kLane * h, row_mask(strip, h), sums[t][h]);
}

// Shifts bytes left (right where negative); what crosses from the neighbouring byte is masked off by the caller.
template <int shift>
inline __m256i shifted(__m256i v) {
  if constexpr (shift > 0) return _mm256_slli_epi16(v, shift);
  if constexpr (shift < 0) return _mm256_srli_epi16(v, -shift);
  return v;
}

// Full bytes are multiplied as signed numbers, without an offset.
template <Type type>
constexpr bool is_signed() {
  return layout_of(type).offset == kCodebookOffset;
}

template <Type type, int step>
inline __m256i read_step(const uint8_t* planes) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int low_parts = 8 / layout.low_bits;
  constexpr int vector = layout.low_bits == 4 ? step % 4 : step / low_parts;
  constexpr int shift = layout.low_bits * (layout.low_bits == 4 ? step / 4 : step % low_parts);
  __m256i codes = load(planes + 64 * vector);
  if constexpr (layout.low_bits < 8)
    codes = _mm256_and_si256(shifted<-shift>(codes), _mm256_set1_epi8((1 << layout.low_bits) - 1));
  if constexpr (layout.high_bits > 0) {
    constexpr int high_parts = 8 / layout.high_bits;
    const __m256i high = shifted<layout.low_bits - layout.high_bits * (step % high_parts)>(
        load(planes + layout.low_bytes() + 64 * (step / high_parts)));
    codes = _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8(((1 << layout.high_bits) - 1) << layout.low_bits)));
  }
  if constexpr (layout.codebook)
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook))), codes);
  if constexpr (is_signed<type>()) codes = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(kCodebookOffset)));
  return codes;
}

inline __m256 read_halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
inline __m128i read_bytes(const uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }

// Scales and minima of one group, of the 8 rows of a half.
template <Type type>
struct Scales {
  static constexpr BlockLayout layout = layout_of(type);
  const uint8_t* block;
  int half;

  __m256 block_scale() const { return read_halves(block + layout.block_scale() + 2 * kLane * half); }
  __m256 block_minimum() const { return read_halves(block + layout.block_minimum() + 2 * kLane * half); }
  static __m256 product(__m256 factor, __m256i bytes) { return _mm256_mul_ps(factor, _mm256_cvtepi32_ps(bytes)); }

  __m256 scale(int group) const {
    const uint8_t* at = block + layout.group_scales() + group * layout.group_scale_bytes() + layout.group_scale_bytes() / kHalves * half;
    if constexpr (layout.scales == ScaleKind::half) return read_halves(at);
    const __m128i bytes = read_bytes(at);
    if constexpr (layout.scales == ScaleKind::signed_byte) return product(block_scale(), _mm256_cvtepi8_epi32(bytes));
    const __m128i low = layout.scales == ScaleKind::nibbles ? _mm_and_si128(bytes, _mm_set1_epi8(0x0f)) : bytes;
    return product(block_scale(), _mm256_cvtepu8_epi32(low));
  }

  __m256 minimum(int group) const {
    constexpr int at_group = layout.scales == ScaleKind::nibbles ? layout.group_scales() : layout.group_minima();
    const uint8_t* at = block + at_group + group * layout.group_scale_bytes() + layout.group_scale_bytes() / kHalves * half;
    if constexpr (layout.scales == ScaleKind::half) return read_halves(at);
    const __m256i bytes = _mm256_cvtepu8_epi32(read_bytes(at));
    return product(block_minimum(), layout.scales == ScaleKind::nibbles ? _mm256_srli_epi32(bytes, 4) : bytes);
  }
};

inline __m256i broadcast32(const void* at) {
  int32_t value;
  __builtin_memcpy(&value, at, sizeof value);
  return _mm256_set1_epi32(value);
}

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Steps whose 16-bit pair sums of products, each at most 2 * 127 * code, can be added without saturating.
template <Type type>
constexpr int steps_before_widening() {
  const int largest_code = (1 << (layout_of(type).low_bits + layout_of(type).high_bits)) - 1;
  const int steps = 32767 / (2 * 127 * largest_code);
  return steps >= 4 ? 4 : steps >= 2 ? 2 : 1;
}

// Sum over steps [begin, begin + count) of codes . x, per row.
template <Type type, int begin, int count>
inline __m256i dot(const __m256i* codes, const uint8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i product = _mm256_setzero_si256();
  if constexpr (is_signed<type>()) {
#pragma GCC unroll 8
    for (int s = begin; s < begin + count; ++s) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[s]), _mm256_sign_epi8(broadcast32(x + 4 * s), codes[s]));
      product = _mm256_add_epi32(product, _mm256_madd_epi16(pairs, ones));
    }
  } else {
    constexpr int run = steps_before_widening<type>();
#pragma GCC unroll 8
    for (int s = begin; s < begin + count; s += run) {
      __m256i pairs = _mm256_maddubs_epi16(codes[s], broadcast32(x + 4 * s));
#pragma GCC unroll 4
      for (int i = 1; i < run; ++i) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[s + i], broadcast32(x + 4 * (s + i))));
      product = _mm256_add_epi32(product, _mm256_madd_epi16(pairs, ones));
    }
  }
  return product;
}

// Scales the whole-number sum of one group: total + (product - offset * x_sum) * scale - x_sum * minimum.
template <Type type>
inline __m256 add_scaled(__m256i product, const uint8_t* x_sums, int part, __m256 scale, __m256 minimum, __m256 total) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr bool corrected = layout.offset > 0 && !is_signed<type>();
  __m256i x_sum = _mm256_setzero_si256();
  if constexpr (layout.minimum || corrected) {
    x_sum = broadcast32(x_sums + 4 * part);
    if constexpr (layout.group == kGroupColumns) x_sum = _mm256_add_epi32(x_sum, broadcast32(x_sums + 4));
  }
  if constexpr (corrected) product = _mm256_sub_epi32(product, _mm256_slli_epi32(x_sum, log2_of(layout.offset)));
  const __m256 whole = _mm256_cvtepi32_ps(product);
  total = part == 0 ? _mm256_mul_ps(whole, scale) : _mm256_fmadd_ps(whole, scale, total);
  if constexpr (layout.minimum) total = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(x_sum), minimum, total);
  return total;
}

template <Type type, int tokens>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = kGroupColumns / layout.group;  // scales within 32 columns
  constexpr int groups = layout.columns / kGroupColumns, lines = layout.bytes() / 64;
  __m256 sums[tokens][kHalves];
  for (int t = 0; t < tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
  const uint8_t* block = strip.tile;
  const uint8_t* x_codes = strip.x;
  const uint8_t* x_scales = strip.x + strip.padded;
  const uint8_t* x_sums = strip.x + strip.padded + strip.padded / 8;
  for (int64_t b = 0; b < strip.blocks; ++b, block += layout.bytes())
    for (int g = 0; g < groups; ++g) {
      for (int line = g * lines / groups; line < (g + 1) * lines / groups; ++line) __builtin_prefetch(block + kAhead + 64 * line);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        const uint8_t* planes = block + g * layout.plane_bytes() + 32 * h;
        const __m256i codes[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes), read_step<type, 2>(planes),
                                       read_step<type, 3>(planes), read_step<type, 4>(planes), read_step<type, 5>(planes),
                                       read_step<type, 6>(planes), read_step<type, 7>(planes)};
        const Scales<type> scales = {block, h};
        __m256 scale[parts], minimum[parts];
        for (int p = 0; p < parts; ++p) {
          scale[p] = scales.scale(g * parts + p);
          minimum[p] = layout.minimum ? scales.minimum(g * parts + p) : _mm256_setzero_ps();
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; ++t) {
          const int64_t row = t * strip.x_stride;
          __m256 total = add_scaled<type>(dot<type, 0, kSteps / parts>(codes, x_codes + row), x_sums + row, 0, scale[0], minimum[0],
                                          _mm256_setzero_ps());
          if constexpr (parts == 2)
            total = add_scaled<type>(dot<type, kSteps / 2, kSteps / 2>(codes, x_codes + row), x_sums + row, 1, scale[1], minimum[1], total);
          sums[t][h] = _mm256_fmadd_ps(total, _mm256_castsi256_ps(broadcast32(x_scales + row)), sums[t][h]);
        }
      }
      x_codes += kGroupColumns;
      x_scales += sizeof(float);
      x_sums += 2 * sizeof(int32_t);
    }
  store_sums<tokens>(strip, sums);
}

// Weights of 8 rows of one column.
template <Type type>
inline __m256 read_column(const uint8_t* block, int column, int half) {
  if constexpr (type == Type::f32) return _mm256_castsi256_ps(load(block + 64 * column + 32 * half));
  if constexpr (type == Type::f16) return read_halves(block + 32 * column + 16 * half);
  const __m256i pairs = load(block + 64 * (column / 2) + 32 * half);
  return _mm256_castsi256_ps(column % 2 ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)) : _mm256_slli_epi32(pairs, 16));
}

template <Type type, int tokens>
void float_strip(const Strip& strip) {
  constexpr int block_bytes = kFloatColumnPad * kTileRows * (type == Type::f32 ? 4 : 2);
  __m256 sums[tokens][kHalves];
  for (int t = 0; t < tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
  const uint8_t* block = strip.tile;
  const uint8_t* x = strip.x;
  for (int64_t b = 0; b < strip.blocks; ++b, block += block_bytes, x += 4 * kFloatColumnPad) {
    for (int line = 0; line < block_bytes; line += 64) __builtin_prefetch(block + kAhead + line);
#pragma GCC unroll 16
    for (int c = 0; c < kFloatColumnPad; ++c) {
      const __m256 top = read_column<type>(block, c, 0), bottom = read_column<type>(block, c, 1);
#pragma GCC unroll 6
      for (int t = 0; t < tokens; ++t) {
        const __m256 value = _mm256_castsi256_ps(broadcast32(x + t * strip.x_stride + 4 * c));
        sums[t][0] = _mm256_fmadd_ps(top, value, sums[t][0]);
        sums[t][1] = _mm256_fmadd_ps(bottom, value, sums[t][1]);
      }
    }
  }
  store_sums<tokens>(strip, sums);
}

template <Type type>
struct Product {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;
  static constexpr int kMostTokens = layout.columns ? 4 : 6;  // whose sums fit the 16 registers

  template <int tokens>
  static constexpr StripFunction of() {
    if constexpr (layout.columns > 0)
      return {tokens, block_strip<type, tokens>};
    else
      return {tokens, float_strip<type, tokens>};
  }

  static StripFunction strip(int64_t tokens) {
    static constexpr StripFunction sizes[5] = {{}, of<1>(), of<2>(), of<3>(), of<4>()};
    return tokens >= kMostTokens ? of<kMostTokens>() : sizes[tokens < 4 ? tokens : 4];
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
