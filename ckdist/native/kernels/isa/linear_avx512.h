// Strips with AVX-512: 16 rows in one vector, bytes by VNNI (unsigned weight codes, signed activation codes), bfloat16 pairs by
// vdpbf16ps. A strip holds the codes of 32 columns in registers while its tokens pass by. Sums are written with explicit
// fused operations, the same ones for every number of tokens.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 says it of its own undefined vectors
#include <immintrin.h>

#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kSteps = kGroupColumns / 4;

template <Type type>
constexpr ActivationFormat activation_of() {
  return layout_of(type).columns ? ActivationFormat::q8 : type == Type::bf16 ? ActivationFormat::bf16 : ActivationFormat::f32;
}

inline __m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }

template <int tokens>
inline void store_sums(const Strip& strip, const __m512* sums) {
  const __mmask16 rows = static_cast<__mmask16>((1u << strip.rows) - 1);
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) _mm512_mask_storeu_ps(strip.y + t * strip.y_stride, rows, sums[t]);
}

// Shifts bytes left (right where negative); what crosses from the neighbouring byte is masked off by the caller.
template <int shift>
inline __m512i shifted(__m512i v) {
  if constexpr (shift > 0) return _mm512_slli_epi16(v, shift);
  if constexpr (shift < 0) return _mm512_srli_epi16(v, -shift);
  return v;
}

template <Type type, int step>
inline __m512i read_step(const uint8_t* planes) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int low_parts = 8 / layout.low_bits;
  constexpr int vector = layout.low_bits == 4 ? step % 4 : step / low_parts;
  constexpr int shift = layout.low_bits * (layout.low_bits == 4 ? step / 4 : step % low_parts);
  __m512i codes = load(planes + 64 * vector);
  if constexpr (layout.low_bits < 8)
    codes = _mm512_and_si512(shifted<-shift>(codes), _mm512_set1_epi8((1 << layout.low_bits) - 1));
  if constexpr (layout.high_bits > 0) {
    constexpr int high_parts = 8 / layout.high_bits;
    const __m512i high = shifted<layout.low_bits - layout.high_bits * (step % high_parts)>(
        load(planes + layout.low_bytes() + 64 * (step / high_parts)));
    codes = _mm512_or_si512(codes, _mm512_and_si512(high, _mm512_set1_epi8(((1 << layout.high_bits) - 1) << layout.low_bits)));
  }
  if constexpr (layout.codebook) {
    const __m512i book = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook)));
    codes = _mm512_shuffle_epi8(book, codes);
  }
  return codes;
}

inline __m512 read_halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }

// Scales and minima of one group, of all rows.
template <Type type>
struct Scales {
  static constexpr BlockLayout layout = layout_of(type);
  const uint8_t* block;
  __m512 block_scale, block_minimum;

  explicit Scales(const uint8_t* at) : block(at) {
    if constexpr (layout.scales != ScaleKind::half) {
      block_scale = read_halves(block + layout.block_scale());
      if constexpr (layout.minimum) block_minimum = read_halves(block + layout.block_minimum());
    }
  }

  __m512 scale(int group) const {
    const uint8_t* at = block + layout.group_scales() + group * layout.group_scale_bytes();
    if constexpr (layout.scales == ScaleKind::half) return read_halves(at);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    if constexpr (layout.scales == ScaleKind::signed_byte) return product(block_scale, _mm512_cvtepi8_epi32(bytes));
    const __m128i low = layout.scales == ScaleKind::nibbles ? _mm_and_si128(bytes, _mm_set1_epi8(0x0f)) : bytes;
    return product(block_scale, _mm512_cvtepu8_epi32(low));
  }

  __m512 minimum(int group) const {
    if constexpr (layout.scales == ScaleKind::nibbles) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + layout.group_scales() + group * kTileRows));
      return product(block_minimum, _mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes), 4));
    }
    const uint8_t* at = block + layout.group_minima() + group * layout.group_scale_bytes();
    if constexpr (layout.scales == ScaleKind::half) return read_halves(at);
    return product(block_minimum, _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }

  static __m512 product(__m512 factor, __m512i bytes) { return _mm512_mul_ps(factor, _mm512_cvtepi32_ps(bytes)); }
};

inline __m512i broadcast32(const void* at) {
  int32_t value;
  __builtin_memcpy(&value, at, sizeof value);
  return _mm512_set1_epi32(value);
}

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Tokens whose chains of additions are interleaved, so that their latencies hide one another.
constexpr int lanes_of(int tokens) { return tokens % 4 == 0 ? 4 : tokens % 3 == 0 ? 3 : tokens; }

// Keeps the compiler from computing every token's address ahead of the loops, where they would not fit the registers.
inline void hide(int64_t& offset) { asm("" : "+r"(offset)); }

// Adds 32 columns to the sums of a few tokens.
template <Type type, int lanes>
inline void add_group(const __m512i* codes, const __m512* scale, const __m512* minimum, const uint8_t* x_codes, const uint8_t* x_scales,
                      const uint8_t* x_sums, int64_t stride, __m512* sums) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = kGroupColumns / layout.group;
  __m512 total[lanes];
#pragma GCC unroll 2
  for (int p = 0; p < parts; ++p) {
    __m512i product[lanes];
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) product[l] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int s = p * kSteps / parts; s < (p + 1) * kSteps / parts; ++s)
#pragma GCC unroll 4
      for (int l = 0; l < lanes; ++l) product[l] = _mm512_dpbusd_epi32(product[l], codes[s], broadcast32(x_codes + l * stride + 4 * s));
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) {
      __m512i x_sum = _mm512_setzero_si512();
      if constexpr (layout.minimum || layout.offset > 0) {
        x_sum = broadcast32(x_sums + l * stride + 4 * p);
        if constexpr (parts == 1) x_sum = _mm512_add_epi32(x_sum, broadcast32(x_sums + l * stride + 4));
      }
      if constexpr (layout.offset > 0) product[l] = _mm512_sub_epi32(product[l], _mm512_slli_epi32(x_sum, log2_of(layout.offset)));
      const __m512 whole = _mm512_cvtepi32_ps(product[l]);
      total[l] = p == 0 ? _mm512_mul_ps(whole, scale[p]) : _mm512_fmadd_ps(whole, scale[p], total[l]);
      if constexpr (layout.minimum) total[l] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(x_sum), minimum[p], total[l]);
    }
  }
#pragma GCC unroll 4
  for (int l = 0; l < lanes; ++l)
    sums[l] = _mm512_fmadd_ps(total[l], _mm512_castsi512_ps(broadcast32(x_scales + l * stride)), sums[l]);
}

template <Type type, int tokens>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = kGroupColumns / layout.group;  // scales within 32 columns
  constexpr int groups = layout.columns / kGroupColumns, lines = layout.bytes() / 64, lanes = lanes_of(tokens);
  __m512 sums[tokens];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = _mm512_setzero_ps();
  const uint8_t* block = strip.tile;
  const uint8_t* x_codes = strip.x;
  const uint8_t* x_scales = strip.x + strip.padded;
  const uint8_t* x_sums = strip.x + strip.padded + strip.padded / 8;
  for (int64_t b = 0; b < strip.blocks; ++b, block += layout.bytes()) {
    const Scales<type> scales(block);
    for (int g = 0; g < groups; ++g) {
      const uint8_t* planes = block + g * layout.plane_bytes();
      for (int line = g * lines / groups; line < (g + 1) * lines / groups; ++line) __builtin_prefetch(block + kAhead + 64 * line);
      const __m512i codes[kSteps] = {read_step<type, 0>(planes), read_step<type, 1>(planes), read_step<type, 2>(planes),
                                     read_step<type, 3>(planes), read_step<type, 4>(planes), read_step<type, 5>(planes),
                                     read_step<type, 6>(planes), read_step<type, 7>(planes)};
      __m512 scale[parts], minimum[parts];
      for (int p = 0; p < parts; ++p) {
        scale[p] = scales.scale(g * parts + p);
        if constexpr (layout.minimum) minimum[p] = scales.minimum(g * parts + p);
      }
      int64_t row = 0;
#pragma GCC unroll 16
      for (int t = 0; t < tokens; t += lanes, row += lanes * strip.x_stride) {
        hide(row);
        add_group<type, lanes>(codes, scale, minimum, x_codes + row, x_scales + row, x_sums + row, strip.x_stride, sums + t);
      }
      x_codes += kGroupColumns;
      x_scales += sizeof(float);
      x_sums += 2 * sizeof(int32_t);
    }
  }
  store_sums<tokens>(strip, sums);
}

// One 64-byte vector of weights: 16 rows of one column, of two in bfloat16.
template <Type type>
inline __m512i read_column(const uint8_t* tile, int index) {
  if constexpr (type == Type::f16) return _mm512_castps_si512(read_halves(tile + 32 * index));
  return load(tile + 64 * index);
}

template <Type type>
inline __m512 multiply_add(__m512 sum, __m512i weights, __m512i x) {
  if constexpr (type == Type::bf16) return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x));
  return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sum);
}

template <Type type, int tokens>
void float_strip(const Strip& strip) {
  constexpr int vectors = 8;  // weights held in registers
  constexpr int vector_bytes = type == Type::f16 ? 32 : 64;
  constexpr int lanes = lanes_of(tokens);
  constexpr int per_block = type == Type::bf16 ? kFloatColumnPad / 2 : kFloatColumnPad;
  __m512 sums[tokens];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = _mm512_setzero_ps();
  const uint8_t* tile = strip.tile;
  const uint8_t* x = strip.x;
  for (int64_t left = strip.blocks * per_block; left > 0; left -= vectors) {
    __m512i weights[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) weights[v] = read_column<type>(tile, v);
    for (int line = 0; line < vectors * vector_bytes; line += 64) __builtin_prefetch(tile + kAhead + line);
    int64_t row = 0;
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t += lanes, row += lanes * strip.x_stride) {
      hide(row);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 4
        for (int l = 0; l < lanes; ++l)
          sums[t + l] = multiply_add<type>(sums[t + l], weights[v], broadcast32(x + row + l * strip.x_stride + 4 * v));
    }
    tile += vectors * vector_bytes;
    x += vectors * 4;
  }
  store_sums<tokens>(strip, sums);
}

template <Type type>
struct Product {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;

  template <int tokens>
  static constexpr StripFunction of() {
    if constexpr (layout.columns > 0)
      return {tokens, block_strip<type, tokens>};
    else
      return {tokens, float_strip<type, tokens>};
  }

  static StripFunction strip(int64_t tokens) {
    static constexpr StripFunction sizes[9] = {{}, of<1>(), of<2>(), of<3>(), of<4>(), of<4>(), of<6>(), of<6>(), of<8>()};
    if (tokens >= 16) return of<16>();
    return tokens >= 12 ? of<12>() : sizes[tokens < 8 ? tokens : 8];
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
