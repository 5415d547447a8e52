// Products of bytes in lanes of 32 bits, for strips of 256 or 512 bits: by vpdpbusd if the level has it, else by
// vpmaddubsw, whose sums of two products have 16 bits and saturate. Both are exact here, so that levels give the same
// bits. Private to isa/.
//
// Without vpdpbusd, for a code c >= 0 of the weights and a code x of the activations, |x| <= 127:
//   codes of 2 to 6 bits   two products are at most 2 * 127 * c, so a few of them can be added before they are widened
//   codes of 8 bits        are converted to signed numbers w, -128 <= w <= 127: |w| times x with the sign of w; two
//   products are at most 2 * 127 * 128 = 32512
//   minima                 have at most 6 bits, their factors 8 bits: two products are at most 2 * 128 * 63, and two of
//   those sums fit
// Widening multiplies by 1, or by the group's scale if scales are whole numbers of 8 bits, which saves their product
// later.
#pragma once
#include <immintrin.h>

#include "core/read_as.h"
#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#if defined(__AVX512F__)
using Lanes = __m512i;
#define CKDIST_LANES(name) _mm512_##name
#define CKDIST_LANES_BITS(name) _mm512_##name##_si512
#else
using Lanes = __m256i;
#define CKDIST_LANES(name) _mm256_##name
#define CKDIST_LANES_BITS(name) _mm256_##name##_si256
#endif

constexpr int kSteps = kGroupColumns / 4;  // of four columns each

inline Lanes broadcast32(const void* at) { return CKDIST_LANES(set1_epi32)(read_as<int32_t>(at)); }

// Reads of activations are written by hand. With 16 registers GCC 12 stores every broadcast to the stack and multiplies
// from there; with 32 registers it uses a register and an instruction for each.
typedef int32_t Word __attribute__((may_alias));
#define CKDIST_WORD(at) (*reinterpret_cast<const Word*>(at))

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool kByteDot = true;
// sum + four unsigned bytes of `codes` times the four signed ones at x, lane by lane.
inline Lanes dot_bytes(Lanes sum, Lanes codes, const uint8_t* x) {
#if defined(__AVX512F__)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(CKDIST_WORD(x)));
#else
  Lanes four;
  asm("vpbroadcastd %3, %1\n\t%{vex%} vpdpbusd %1, %2, %0" : "+x"(sum), "=&x"(four) : "x"(codes), "m"(CKDIST_WORD(x)));
#endif
  return sum;
}
// The same for two lanes' bytes. The bytes of `codes` have at most 6 bits.
inline Lanes dot_minima(Lanes first, const uint8_t* x, Lanes second, const uint8_t* y) {
  return dot_bytes(dot_bytes(CKDIST_LANES_BITS(setzero)(), first, x), second, y);
}

#else

constexpr bool kByteDot = false;
inline Lanes dot_minima(Lanes first, const uint8_t* x, Lanes second, const uint8_t* y) {
  const Lanes pairs = CKDIST_LANES(add_epi16)(CKDIST_LANES(maddubs_epi16)(first, broadcast32(x)),
                                              CKDIST_LANES(maddubs_epi16)(second, broadcast32(y)));
  return CKDIST_LANES(madd_epi16)(pairs, CKDIST_LANES(set1_epi16)(1));
}

#endif

// True if codes are multiplied as signed numbers without an offset.
template <Type type>
constexpr bool is_signed() {
  return !kByteDot && layout_of(type).offset == kCodebookOffset;
}

// Without vpdpbusd, NVFP4 has twice the products, by the factor that widens them, and half the scales, which is exact:
// sums of the activations are -32 times those of 16 columns and the offset is 16, so they need no shift.
template <Type type>
constexpr bool is_doubled() {
  return !kByteDot && layout_of(type).scales == ScaleKind::float8;
}
template <Type type>
constexpr int doubled_sums_shift() {
  return sums_shift<type>() - (is_doubled<type>() ? 1 : 0);
}

template <Type type>
inline Lanes read_sums(const uint8_t* at) {
  constexpr int shift = doubled_sums_shift<type>();
  const Lanes sums = broadcast32(at);
  if constexpr (shift < 0) return CKDIST_LANES(slli_epi32)(sums, -shift);
  return shift > 0 ? CKDIST_LANES(srai_epi32)(sums, shift) : sums;
}

// Number of steps whose sums of two products can be added in 16 bits.
template <Type type>
constexpr int steps_before_widening() {
  const int steps = is_signed<type>() ? 1 : 32767 / (2 * 127 * layout_of(type).largest_code());
  return steps >= 8 ? 8 : steps >= 4 ? 4 : steps >= 2 ? 2 : 1;
}

// Products, in pairs, of the codes of one step with the columns at x. `many`: tokens; the codes stay in registers. Else
// the columns may stay.
template <Type type, bool many>
inline Lanes multiply_pairs(Lanes codes, const uint8_t* x) {
#if defined(__AVX512F__)
  const Lanes four = broadcast32(x);
  if constexpr (!is_signed<type>()) return _mm512_maddubs_epi16(codes, four);
  return _mm512_maddubs_epi16(_mm512_abs_epi8(codes),
                              _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), four));
#else
  Lanes pairs;
  if constexpr (!many)
    pairs = is_signed<type>() ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(broadcast32(x), codes))
                              : _mm256_maddubs_epi16(codes, broadcast32(x));
  else if constexpr (is_signed<type>())
    asm("vpbroadcastd %3, %0\n\tvpsignb %2, %0, %0\n\tvpmaddubsw %0, %1, %0"
        : "=&x"(pairs)
        : "x"(_mm256_abs_epi8(codes)), "xm"(codes), "m"(CKDIST_WORD(x)));
  else asm("vpbroadcastd %2, %0\n\tvpmaddubsw %0, %1, %0" : "=&x"(pairs) : "x"(codes), "m"(CKDIST_WORD(x)));
  return pairs;
#endif
}

// sum + factor * (codes . x) over `count` steps. factor is the same in both halves of a lane; with vpdpbusd it is 1.
template <Type type, int count, bool many>
inline Lanes add_products(Lanes sum, Lanes factor, const Lanes* codes, const uint8_t* x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  (void)factor;
#pragma GCC unroll 8
  for (int s = 0; s < count; ++s) sum = dot_bytes(sum, codes[s], x + 4 * s);
#else
  constexpr int run = steps_before_widening<type>() < count ? steps_before_widening<type>() : count;
#pragma GCC unroll 8
  for (int s = 0; s < count; s += run) {
    Lanes pairs = multiply_pairs<type, many>(codes[s], x + 4 * s);
#pragma GCC unroll 8
    for (int i = 1; i < run; ++i)
      pairs = CKDIST_LANES(add_epi16)(pairs, multiply_pairs<type, many>(codes[s + i], x + 4 * (s + i)));
    sum = CKDIST_LANES(add_epi32)(sum, CKDIST_LANES(madd_epi16)(pairs, factor));
  }
#endif
  return sum;
}

// `low` in the lower half of every lane, `high` in the upper one; both fit 16 bits.
inline Lanes pair_of(Lanes low, Lanes high) {
  return CKDIST_LANES_BITS(or)(CKDIST_LANES_BITS (and)(low, CKDIST_LANES(set1_epi32)(0xffff)),
                               CKDIST_LANES(slli_epi32)(high, 16));
}

// Scales of the 32 columns of a group for add_products, if scales are whole numbers; and minus the offset's part of
// their products. `scaled` false: all 1, for products that are scaled later, which is cheaper for a single token.
template <Type type, bool scaled = layout_of(type).whole()>
struct PairScales {
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int parts = layout.parts();
  static constexpr bool offset = layout.offset > 0 && !is_signed<type>();
  static_assert(kByteDot || !scaled || !offset || parts == 2, "sums are read for two groups of 16 columns");
  Lanes factor[parts], of_sums;

  explicit PairScales(const Lanes* scale) {
    constexpr int16_t one = is_doubled<type>() ? 2 : 1;
    for (int p = 0; p < parts; ++p) factor[p] = scaled ? pair_of(scale[p], scale[p]) : CKDIST_LANES(set1_epi16)(one);
    of_sums = CKDIST_LANES_BITS(setzero)();
    if constexpr (scaled && offset)  // at most 32 * 128 each
      of_sums = pair_of(CKDIST_LANES(slli_epi32)(scale[0], log2_of(layout.offset)),
                        CKDIST_LANES(slli_epi32)(scale[parts - 1], log2_of(layout.offset)));
  }
};

// The offset's part for the two sums of 16 columns at `at`. The sums are minus 32 times at most 16 * 127.
inline Lanes offset_products(Lanes of_sums, const uint8_t* at) {
  int32_t sums[2];
  __builtin_memcpy(sums, at, sizeof sums);
  const uint32_t low = static_cast<uint32_t>(sums[0] / kSums16Factor & 0xffff);
  const uint32_t both = low | static_cast<uint32_t>(sums[1] / kSums16Factor) << 16;
  return CKDIST_LANES(madd_epi16)(of_sums, CKDIST_LANES(set1_epi32)(static_cast<int32_t>(both)));
}

#if !defined(__AVX512F__)
// Adds products of two vectors of codes with the same columns at x to sum[0] and sum[1]. Without vpdpbusd they are
// widened by factor[0] and factor[1]. `pairs`: after the first piece, sums of 16 bits stay in `carried`.
template <Type type, bool pairs, int piece, int steps>
inline void multiply_halves(Lanes* sum, Lanes* carried, const Lanes (*codes)[steps], const Lanes* factor,
                            const uint8_t* x) {
#if defined(__AVXVNNI__)
  (void)carried, (void)factor;
#pragma GCC unroll 8
  for (int s = 0; s < steps; ++s) {
    Lanes four;
    asm("vpbroadcastd %5, %2\n\t%{vex%} vpdpbusd %2, %3, %0\n\t%{vex%} vpdpbusd %2, %4, %1"
        : "+x"(sum[0]), "+x"(sum[1]), "=&x"(four)
        : "x"(codes[0][s]), "x"(codes[1][s]), "m"(CKDIST_WORD(x + 4 * s)));
  }
#else
  constexpr int run = steps_before_widening<type>() < steps ? steps_before_widening<type>() : steps;
  static_assert(!pairs || run == steps, "what is carried is the sum of all steps");
#pragma GCC unroll 8
  for (int s = 0; s < steps; s += run) {
    Lanes first, second, both[2];
    if constexpr (is_signed<type>())
      asm("vpbroadcastd %6, %1\n\tvpsignb %4, %1, %0\n\tvpsignb %5, %1, %1\n\t"
          "vpmaddubsw %0, %2, %0\n\tvpmaddubsw %1, %3, %1"
          : "=&x"(both[0]), "=&x"(both[1])
          : "x"(_mm256_abs_epi8(codes[0][s])), "x"(_mm256_abs_epi8(codes[1][s])), "xm"(codes[0][s]), "xm"(codes[1][s]),
            "m"(CKDIST_WORD(x + 4 * s)));
    else
      asm("vpbroadcastd %4, %1\n\tvpmaddubsw %1, %2, %0\n\tvpmaddubsw %1, %3, %1"
          : "=&x"(both[0]), "=&x"(both[1])
          : "x"(codes[0][s]), "x"(codes[1][s]), "m"(CKDIST_WORD(x + 4 * s)));
#pragma GCC unroll 8
    // Added by hand: GCC 12 delays these additions and stores the operands.
    for (int i = s + 1; i < s + run; ++i)
      asm("vpbroadcastd %6, %3\n\tvpmaddubsw %3, %4, %2\n\tvpmaddubsw %3, %5, %3\n\t"
          "vpaddw %2, %0, %0\n\tvpaddw %3, %1, %1"
          : "+x"(both[0]), "+x"(both[1]), "=&x"(first), "=&x"(second)
          : "x"(codes[0][i]), "x"(codes[1][i]), "m"(CKDIST_WORD(x + 4 * i)));
    if constexpr (pairs && piece == 0) {
      carried[0] = both[0], carried[1] = both[1];
    } else {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        if constexpr (pairs) both[h] = _mm256_add_epi16(both[h], carried[h]);
        sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(both[h], factor[h]));
      }
    }
  }
#endif
}
#endif

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
