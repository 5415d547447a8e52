#include "kernels/isa/activations.h"

#include <cstring>

#include "kernels/half.h"
#include "kernels/isa/simd.h"

#if defined(__AVX2__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 emits it for its own undefined vectors
#include <immintrin.h>
#elif defined(CKDIST_NEON)
#include <arm_neon.h>
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kGroup = 32;  // columns with one scale
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;

// Magnitudes are compared as integers, so NaN is the largest. Codes are round(x / scale), half to even, in [-127, 127].
#if defined(__AVX2__)
uint32_t largest_magnitude(const float* x) {
  const __m256i mask = _mm256_set1_epi32(kMagnitude);
  const __m256i* v = reinterpret_cast<const __m256i*>(x);
  const __m256i low = _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(v), mask),
                                       _mm256_and_si256(_mm256_loadu_si256(v + 1), mask));
  const __m256i high = _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(v + 2), mask),
                                        _mm256_and_si256(_mm256_loadu_si256(v + 3), mask));
  const __m256i eight = _mm256_max_epu32(low, high);
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

// Also writes the sums of the two halves, times -kSums16Factor.
void round_codes(const float* x, float inverse, int8_t* codes, int32_t* sums) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
  const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), factor));
  const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), factor));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing interleaves the 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(packed, order));
  const __m256i halves = _mm256_hadd_epi32(_mm256_add_epi32(a, b),
                                           _mm256_add_epi32(c, d));  // in each 128 bits: both halves' sums, twice each
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  sum = _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), _mm_hadd_epi32(sum, sum)), 5);
  static_assert(kSums16Factor == 1 << 5);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), sum);
}
#elif defined(CKDIST_NEON)
uint32_t largest_magnitude(const float* x) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (int i = 0; i < kGroup; i += 4)
    largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(kMagnitude)));
  return vmaxvq_u32(largest);
}

void round_codes(const float* x, float inverse, int8_t* codes, int32_t* sums) {
  for (int half = 0; half < 2; ++half) {
    int16x8_t eights[2];
    for (int i = 0; i < 2; ++i) {
      const float* const at = x + 16 * half + 8 * i;
      const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(at), inverse));
      eights[i] = vcombine_s16(vmovn_s32(low), vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(at + 4), inverse))));
    }
    vst1q_s8(codes + 16 * half, vcombine_s8(vmovn_s16(eights[0]), vmovn_s16(eights[1])));
    sums[half] = -vaddvq_s16(vaddq_s16(eights[0], eights[1])) * kSums16Factor;
  }
}
#else
uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

void round_codes(const float* x, float inverse, int8_t* codes, int32_t* sums) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, as the hardware does
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<int8_t>(bits_of_float(x[i] * inverse + shift) & 0xff);
  for (int half = 0; half < 2; ++half) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup / 2; ++i) sum -= codes[half * kGroup / 2 + i];
    sums[half] = sum * kSums16Factor;
  }
}
#endif

void prepare_group(const float* x, int8_t* codes, float* scale, int32_t* sums) {
  const uint32_t largest = largest_magnitude(x);
  const float magnitude = float_of_bits(largest);
  // If a group's magnitude has no finite reciprocal, the group counts as zero.
  const bool zero = magnitude < 1e-35f;
  if (zero || largest >= kInfinity) {
    std::memset(codes, 0, kGroup);
    *scale = zero ? 0.0f : float_of_bits(0x7fc00000u);
    sums[0] = sums[1] = 0;
    return;
  }
  *scale = magnitude / 127.0f;
  round_codes(x, 127.0f / magnitude, codes, sums);
}

// Computes the scale of GroupSums for the largest magnitude `largest` (bits of a float), and its inverse. Returns false
// if all sums are zero, or not finite.
bool scale_group_sums(uint32_t largest, GroupSums* out, float* inverse) {
  const bool zero = float_of_bits(largest) < 1e-30f;
  if (zero || largest >= kInfinity) {
    std::memset(out->high, 0, sizeof out->high + sizeof out->low);
    out->scale = zero ? 0.0f : float_of_bits(0x7fc00000u);
    return false;
  }
  // The power of two that scales the largest into [16256, 32512), where the high byte of the rounded number cannot
  // overflow.
  constexpr uint32_t most = 0x007e0000u;  // fraction bits of 32512
  const uint32_t exponent = (largest >> 23) - 14 + ((largest & 0x007fffffu) >= most ? 1 : 0);
  out->scale = float_of_bits(exponent << 23);
  *inverse = float_of_bits((254 - exponent) << 23);
  return true;
}

// Rounds scale * sum of eight groups to 16 bits, relative to their largest magnitude.
void prepare_group_sums(const float* scales, const int32_t* sums, GroupSums* out) {
  float values[8];
  uint32_t largest = 0;
  for (int i = 0; i < 8; ++i) {
    values[i] = scales[i] * static_cast<float>(sums[i] / kSums32Factor);
    const uint32_t magnitude = bits_of_float(values[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  float inverse;
  if (!scale_group_sums(largest, out, &inverse)) return;
  constexpr float shift = 12582912.0f;
  for (int i = 0; i < 8; ++i) {
    const int32_t value =
        static_cast<int32_t>(bits_of_float(values[i] * inverse + shift)) - 0x4b400000;  // rounded, half to even
    const int32_t high = (value + 128) >> 8;
    out->high[i] = static_cast<int8_t>(high);
    out->low[i] = static_cast<int8_t>(value - high * 256);
  }
}

#if defined(__AVX512F__)
constexpr int kBlockGroups = kColumnPad / kGroup;
static_assert(kBlockGroups == 8);

// Folds neighbouring halves, then quarters, of two vectors.
template <class Fold>
__m512i quarters(__m512i a, __m512i b, Fold&& fold) {
  return fold(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// The largest magnitude of each of eight groups, as bits of a float.
__m256i group_magnitudes(const float* x) {
  const auto largest_of = [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); };
  const __m512i mask = _mm512_set1_epi32(kMagnitude);
  __m512i most[kBlockGroups];
  for (int g = 0; g < kBlockGroups; ++g)
    most[g] = _mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x + g * kGroup), mask),
                               _mm512_and_si512(_mm512_loadu_si512(x + g * kGroup + 16), mask));
  // Quarter q of `low` is the partial result of group q, quarter q of `high` that of group 4 + q.
  const __m512i low =
      quarters(quarters(most[0], most[1], largest_of), quarters(most[2], most[3], largest_of), largest_of);
  const __m512i high =
      quarters(quarters(most[4], most[5], largest_of), quarters(most[6], most[7], largest_of), largest_of);
  const __m512 l = _mm512_castsi512_ps(low), h = _mm512_castsi512_ps(high);
  __m512i each = largest_of(_mm512_castps_si512(_mm512_shuffle_ps(l, h, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(l, h, 0xdd)));
  each = largest_of(each, _mm512_shuffle_epi32(each, _MM_PERM_CDAB));  // quarter q: groups q and q, 4 + q and 4 + q
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, each));
}

// The same as prepare_group_sums for vectors.
void prepare_group_sums(__m256 scales, __m256i sums, GroupSums* out) {
  const __m256 values = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(_mm256_srai_epi32(sums, 7)));
  const __m256i sizes = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(kMagnitude));
  __m128i top = _mm_max_epu32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
  top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
  const uint32_t largest = static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1))));
  float inverse;
  if (!scale_group_sums(largest, out, &inverse)) return;
  const __m256i value = _mm256_cvtps_epi32(_mm256_mul_ps(values, _mm256_set1_ps(inverse)));
  const __m256i upper = _mm256_srai_epi32(_mm256_add_epi32(value, _mm256_set1_epi32(128)), 8);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out->high), _mm256_cvtepi32_epi8(upper));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out->low),
                   _mm256_cvtepi32_epi8(_mm256_sub_epi32(value, _mm256_slli_epi32(upper, 8))));
}

// A block of eight whole groups and its GroupSums, with identical results. Returns false without writing if a group has
// an infinity or a NaN.
bool prepare_block(const float* x, int8_t* codes, float* scales, int32_t* sums32, int32_t* sums16,
                   GroupSums* group_sums) {
  const auto sum_of = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
  const __m256i magnitudes = group_magnitudes(x);
  if (_mm256_cmpge_epu32_mask(magnitudes, _mm256_set1_epi32(kInfinity))) return false;
  const __m256 magnitude = _mm256_castsi256_ps(magnitudes), most_code = _mm256_set1_ps(127.0f);
  const __mmask8 there = _mm256_cmp_ps_mask(magnitude, _mm256_set1_ps(1e-35f), _CMP_GE_OQ);
  const __m256 scale = _mm256_maskz_div_ps(there, magnitude, most_code);
  _mm256_storeu_ps(scales, scale);
  float factors[kBlockGroups];
  _mm256_storeu_ps(factors, _mm256_maskz_div_ps(there, most_code, magnitude));
  __m512i sums[kBlockGroups / 2];
  for (int i = 0; i < kBlockGroups / 2; ++i) {
    __m512i whole[4];
    for (int v = 0; v < 4; ++v)
      whole[v] = _mm512_cvtps_epi32(
          _mm512_mul_ps(_mm512_loadu_ps(x + 2 * i * kGroup + 16 * v), _mm512_set1_ps(factors[2 * i + v / 2])));
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
    const __m512i places =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // packing interleaves the quarters
    _mm512_storeu_si512(codes + 2 * i * kGroup, _mm512_permutexvar_epi32(places, packed));
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), packed);
    sums[i] = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));  // lane v of each quarter: a partial sum of whole[v]
  }
  const __m512i sum = quarters(quarters(sums[0], sums[1], sum_of), quarters(sums[2], sums[3], sum_of), sum_of);
  static_assert(kSums16Factor == 1 << 5 && kSums32Factor == 1 << 7);
  const __m512i minus = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum), 5);
  _mm512_storeu_si512(sums16, minus);
  const __m512i pairs = _mm512_add_epi32(minus, _mm512_shuffle_epi32(minus, _MM_PERM_CDAB));
  const __m256i of_groups = _mm256_slli_epi32(_mm512_cvtepi64_epi32(pairs), 2);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums32), of_groups);
  prepare_group_sums(scale, of_groups, group_sums);
  return true;
}
#endif

void prepare_q8(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  const int64_t padded = ActivationRow::padded(cols);
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  float* scales = reinterpret_cast<float*>(row + ActivationRow::scales(padded));
  int32_t* sums32 = reinterpret_cast<int32_t*>(row + ActivationRow::sums32(padded));
  int32_t* sums16 = reinterpret_cast<int32_t*>(row + ActivationRow::sums16(padded));
  GroupSums* group_sums = reinterpret_cast<GroupSums*>(row + ActivationRow::group_sums(padded));
  for (int64_t start = 0, done = 0; start < padded; start = done) {
    const int64_t group = start / kGroup;
#if defined(__AVX512F__)
    if (start % kColumnPad == 0 && start >= lead && start + kColumnPad <= lead + n &&
        prepare_block(x + (start - lead), codes + start, scales + group, sums32 + group, sums16 + 2 * group,
                      group_sums + start / kColumnPad)) {
      done = start + kColumnPad;
      continue;
    }
#endif
    done = start + kGroup;
    const int64_t begin = lead > start ? lead : start;
    const int64_t end = lead + n < start + kGroup ? lead + n : start + kGroup;
    float edge[kGroup];
    const bool whole = end - begin == kGroup;
    if (!whole) {
      std::memset(edge, 0, sizeof edge);
      if (end > begin)
        std::memcpy(edge + (begin - start), x + (begin - lead), static_cast<size_t>(end - begin) * sizeof(float));
    }
    prepare_group(whole ? x + (start - lead) : edge, codes + start, scales + group, sums16 + 2 * group);
    sums32[group] = (sums16[2 * group] + sums16[2 * group + 1]) * (kSums32Factor / kSums16Factor);
    if (done % kColumnPad == 0)
      prepare_group_sums(scales + group - 7, sums32 + group - 7, group_sums + start / kColumnPad);
  }
}

void prepare_bf16(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  uint16_t* out = reinterpret_cast<uint16_t*>(row);
  const int64_t padded = ActivationRow::padded(cols);
  std::memset(out, 0, static_cast<size_t>(lead) * sizeof *out);
  for (int64_t i = 0; i < n; ++i) out[lead + i] = bf16_of_float(x[i]);
  std::memset(out + lead + n, 0, static_cast<size_t>(padded - lead - n) * sizeof *out);
}

void prepare_f32(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  float* out = reinterpret_cast<float*>(row);
  const int64_t padded = ActivationRow::padded(cols);
  std::memset(out, 0, static_cast<size_t>(lead) * sizeof *out);
  std::memcpy(out + lead, x, static_cast<size_t>(n) * sizeof *out);
  std::memset(out + lead + n, 0, static_cast<size_t>(padded - lead - n) * sizeof *out);
}

}  // namespace

void prepare_activations(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  if (format == ActivationFormat::q8) return prepare_q8(x, n, lead, cols, row);
  if (format == ActivationFormat::bf16) return prepare_bf16(x, n, lead, cols, row);
  prepare_f32(x, n, lead, cols, row);
}

void prepare_in_strip(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  constexpr int64_t columns = ActivationRow::kStripColumns, step = ActivationRow::kStripRows * columns * 2;
  const int64_t padded = ActivationRow::padded(cols);
  for (int64_t first = 0; first < padded; first += columns, row += step) {
    uint16_t* const out = reinterpret_cast<uint16_t*>(row);
    const float* const from = x + (first - lead);
    __builtin_prefetch(row + 64, 1);  // of the next row, which hardware does not expect
    if (first >= lead && first + columns <= lead + n) {
      for (int64_t i = 0; i < columns; i += kLanes) store_bf16(out + i, load(from + i));
      continue;
    }
    for (int64_t i = 0; i < columns; ++i)
      out[i] = first + i >= lead && first + i < lead + n ? bf16_of_float(from[i]) : uint16_t{0};
  }
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
