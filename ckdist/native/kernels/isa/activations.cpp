#include "kernels/isa/activations.h"

#include <cstring>

#include "kernels/half.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kGroup = 32;  // columns with one scale
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;

// Magnitudes compare as integers, and so a NaN counts as the largest.
// Codes are round(x / scale), half to even, in [-127, 127].
#if defined(__AVX2__)
uint32_t largest_magnitude(const float* x) {
  const __m256i mask = _mm256_set1_epi32(kMagnitude);
  const __m256i* v = reinterpret_cast<const __m256i*>(x);
  const __m256i low = _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(v), mask), _mm256_and_si256(_mm256_loadu_si256(v + 1), mask));
  const __m256i high = _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(v + 2), mask), _mm256_and_si256(_mm256_loadu_si256(v + 3), mask));
  const __m256i eight = _mm256_max_epu32(low, high);
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

// Writes the sums of the two halves times -kSums16Factor.
void round_codes(const float* x, float inverse, int8_t* codes, int32_t* sums) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
  const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), factor));
  const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), factor));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing interleaves the 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(packed, order));
  const __m256i halves = _mm256_hadd_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));  // of each 128 bits: first half twice, second twice
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  sum = _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), _mm_hadd_epi32(sum, sum)), 5);
  static_assert(kSums16Factor == 1 << 5);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), sum);
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
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, rounding as the hardware does
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
  // A group too small for its reciprocal to be finite counts as zero.
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

// Eight groups' scales times sums, as 16 bits each of their largest magnitude.
void prepare_group_sums(const float* scales, const int32_t* sums, GroupSums* out) {
  float values[8];
  uint32_t largest = 0;
  for (int i = 0; i < 8; ++i) {
    values[i] = scales[i] * static_cast<float>(sums[i] / kSums32Factor);
    const uint32_t magnitude = bits_of_float(values[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool zero = float_of_bits(largest) < 1e-30f;
  if (zero || largest >= kInfinity) {
    std::memset(out->high, 0, sizeof out->high + sizeof out->low);
    out->scale = zero ? 0.0f : float_of_bits(0x7fc00000u);
    return;
  }
  // The power of two that brings the largest into [16256, 32512), where the high byte of the rounded number cannot overflow.
  constexpr uint32_t most = 0x007e0000u;  // fraction bits of 32512
  const uint32_t exponent = (largest >> 23) - 14 + ((largest & 0x007fffffu) >= most ? 1 : 0);
  out->scale = float_of_bits(exponent << 23);
  const float inverse = float_of_bits((254 - exponent) << 23);
  constexpr float shift = 12582912.0f;
  for (int i = 0; i < 8; ++i) {
    const int32_t value = static_cast<int32_t>(bits_of_float(values[i] * inverse + shift)) - 0x4b400000;  // rounded, half to even
    const int32_t high = (value + 128) >> 8;
    out->high[i] = static_cast<int8_t>(high);
    out->low[i] = static_cast<int8_t>(value - high * 256);
  }
}

void prepare_q8(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  const int64_t padded = ActivationRow::padded(cols);
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  float* scales = reinterpret_cast<float*>(row + ActivationRow::scales(padded));
  int32_t* sums32 = reinterpret_cast<int32_t*>(row + ActivationRow::sums32(padded));
  int32_t* sums16 = reinterpret_cast<int32_t*>(row + ActivationRow::sums16(padded));
  GroupSums* group_sums = reinterpret_cast<GroupSums*>(row + ActivationRow::group_sums(padded));
  for (int64_t start = 0; start < padded; start += kGroup) {
    const int64_t group = start / kGroup;
    const int64_t begin = lead > start ? lead : start;
    const int64_t end = lead + n < start + kGroup ? lead + n : start + kGroup;
    float edge[kGroup];
    const bool whole = end - begin == kGroup;
    if (!whole) {
      std::memset(edge, 0, sizeof edge);
      if (end > begin) std::memcpy(edge + (begin - start), x + (begin - lead), static_cast<size_t>(end - begin) * sizeof(float));
    }
    prepare_group(whole ? x + (start - lead) : edge, codes + start, scales + group, sums16 + 2 * group);
    sums32[group] = (sums16[2 * group] + sums16[2 * group + 1]) * (kSums32Factor / kSums16Factor);
  }
  for (int64_t block = 0; block < padded / kColumnPad; ++block) prepare_group_sums(scales + 8 * block, sums32 + 8 * block, group_sums + block);
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

}  // namespace CKDIST_ISA
}  // namespace ckdist
