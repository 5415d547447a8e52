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
uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Codes are round(x / scale), half to even, in [-127, 127].
#if defined(__AVX2__)
void round_codes(const float* x, float inverse, int8_t* codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
  const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), factor));
  const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), factor));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing interleaves the 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(packed, order));
}
#else
void round_codes(const float* x, float inverse, int8_t* codes) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, rounding as the hardware does
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<int8_t>(bits_of_float(x[i] * inverse + shift) & 0xff);
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
  round_codes(x, 127.0f / magnitude, codes);
  for (int half = 0; half < 2; ++half) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup / 2; ++i) sum += codes[half * kGroup / 2 + i];
    sums[half] = sum;
  }
}

void prepare_q8(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row) {
  const int64_t padded = ActivationRow::padded(cols);
  int8_t* codes = reinterpret_cast<int8_t*>(row);
  float* scales = reinterpret_cast<float*>(row + padded);
  int32_t* sums = reinterpret_cast<int32_t*>(row + padded + padded / 8);
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
    prepare_group(whole ? x + (start - lead) : edge, codes + start, scales + group, sums + 2 * group);
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

}  // namespace CKDIST_ISA
}  // namespace ckdist
