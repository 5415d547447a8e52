// Conversion of numbers to 16-bit integers with one scale, and attention over an integer cache. Private to isa/.
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/integers.h"

namespace ckdist {
namespace CKDIST_ISA {

// Like shape_of(), except for tasks that AMX computes.
Shape shape_of_integers(const AttentionTask& task);
int64_t integer_scratch_floats(const CacheShape& cache, int tokens, int heads);
void attend_integer(const AttentionTask& task, float* scratch);
void attend_integer_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch);
// The same if keys, values or both have less than 16 bits.
void attend_bytes(const AttentionTask& task, float* scratch);
void attend_bytes_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch);

// Sums of products must stay below 2^31. For q.k the Cauchy-Schwarz inequality gives the bound: both vectors of codes
// are at most kLongest long, including rounding (at most half a code in each of 4096 dimensions). For the weighted sum
// of values the bound is the sum of a span's weights (kMostWeight) times the largest code of a value, including half a
// unit of rounding in each of 256 weights.
constexpr float kLargestCode = 32767.0f, kLongest = 46200.0f;
constexpr float kLargestValue = 16383.0f, kMostWeight = 130800.0f;

// whole: number of Vecs of x if known, or 0. If known, loops are unrolled, and numbers stay in registers.
template <int whole>
CKDIST_INLINE float quantise_vecs(const float* x, int n, float largest, float longest, int16_t* codes) {
  if constexpr (whole > 0) n = whole * kLanes;
  const auto lanes = [&](int i) { return !whole && n - i < kLanes ? load_n(x + i, n - i) : load(x + i); };
  Vec peak = set(0.0f), probe = set(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    peak = max(peak, abs(lanes(i)));
    probe = fma(lanes(i), set(0.0f), probe);
  }
  const float magnitude = reduce_max(peak);
  const bool bad = !(reduce_sum(probe) == 0.0f);
  if (bad || magnitude < 1e-28f) {
    std::memset(codes, 0, 2 * n);
    return bad ? __builtin_nanf("") : 0.0f;
  }
  Vec squares = set(0.0f);
  const Vec inverse = set(1.0f / magnitude);
  for (int i = 0; i < n; i += kLanes) squares = fma(lanes(i) * inverse, lanes(i) * inverse, squares);
  const float limit = longest / __builtin_sqrtf(reduce_sum(squares));
  const float peak_code = limit < largest ? limit : largest;
  const Vec factor = set(peak_code / magnitude);
  for (int i = 0; i < n; i += kLanes) {
    int16_t rounded[kLanes];
    store_i16(rounded, lanes(i) * factor);
    std::memcpy(codes + i, rounded, 2 * (n - i < kLanes ? n - i : kLanes));
  }
  return magnitude / peak_code;
}
// codes = round(x / scale), with codes of at most `largest` and a vector length of at most `longest`. Returns the
// scale, or NaN if any x is NaN or infinite, so that it shows in the result. n is a multiple of 8.
CKDIST_INLINE float quantise(const float* x, int n, float largest, float longest, int16_t* codes) {
  if (n == 8 * kLanes) return quantise_vecs<8>(x, n, largest, longest, codes);
  return n == 4 * kLanes ? quantise_vecs<4>(x, n, largest, longest, codes)
                         : quantise_vecs<0>(x, n, largest, longest, codes);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
