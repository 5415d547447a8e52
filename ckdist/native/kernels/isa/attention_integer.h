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

struct CodeScale {
  float factor, scale;  // codes are numbers * factor, numbers are codes * scale
};

// The numbers of a row. whole: the number of its Vecs if known, or 0. If known, loops are unrolled.
template <int whole>
struct Numbers {
  const float* x;
  int n;

  int count() const { return whole ? whole * kLanes : n; }
  Vec load_at(int i) const { return !whole && n - i < kLanes ? load_n(x + i, n - i) : load(x + i); }
  // NaN if any number is NaN or infinite.
  float magnitude() const {
    Vec peak = set(0.0f), probe = set(0.0f);
    for (int i = 0; i < count(); i += kLanes) {
      peak = max(peak, abs(load_at(i)));
      probe = fma(load_at(i), set(0.0f), probe);
    }
    if (__builtin_expect(!(reduce_sum(probe) == 0.0f), false)) return __builtin_nanf("");
    return reduce_max(peak);
  }
  // For codes of at most `largest` and a vector length of at most `longest`.
  CodeScale fit(float magnitude, float largest, float longest) const {
    if (!(magnitude >= 1e-28f)) return {0.0f, magnitude < 1e-28f ? 0.0f : magnitude};
    Vec squares = set(0.0f);
    const Vec inverse = set(1.0f / magnitude);
    for (int i = 0; i < count(); i += kLanes) squares = fma(load_at(i) * inverse, load_at(i) * inverse, squares);
    const float limit = longest / __builtin_sqrtf(reduce_sum(squares));
    const float peak_code = limit < largest ? limit : largest;
    return {peak_code / magnitude, magnitude / peak_code};
  }
  // All codes are 0 if the factor is.
  void round(float factor, int16_t* codes) const {
    if (factor == 0.0f) {
      std::memset(codes, 0, 2 * count());
      return;
    }
    for (int i = 0; i < count(); i += kLanes) {
      const Vec numbers = load_at(i) * set(factor);
      if (count() - i >= kLanes) {
        store_i16(codes + i, numbers);
        continue;
      }
      int16_t rounded[kLanes];
      store_i16(rounded, numbers);
      std::memcpy(codes + i, rounded, 2 * (count() - i));
    }
  }
};

// codes = round(x / scale), with codes of at most `largest` and a vector length of at most `longest`. Returns the
// scale, or NaN if any x is NaN or infinite, so that it shows in the result. n is a multiple of 8.
CKDIST_INLINE float quantise(const float* x, int n, float largest, float longest, int16_t* codes) {
  const auto quantise_one = [&](auto numbers) CKDIST_INLINED {
    const CodeScale to = numbers.fit(numbers.magnitude(), largest, longest);
    numbers.round(to.factor, codes);
    return to.scale;
  };
  if (n == 8 * kLanes) return quantise_one(Numbers<8>{x, n});
  return n == 4 * kLanes ? quantise_one(Numbers<4>{x, n}) : quantise_one(Numbers<0>{x, n});
}

// The same for up to sixteen rows: row(r) are the numbers of row r, codes are (rows, n) through the stride. Each step
// is done for all rows before the next one, so that no row waits for the sums of another one.
template <class Row>
CKDIST_INLINE void quantise_rows(Row&& row, int rows, int n, float largest, float longest, int16_t* codes,
                                 int64_t stride, float* scales) {
  const auto quantise_all = [&](auto numbers) CKDIST_INLINED {
    using Numbers = decltype(numbers);
    float magnitudes[kLanes], factors[kLanes];
    for (int r = 0; r < rows; ++r) magnitudes[r] = Numbers{row(r), n}.magnitude();
    for (int r = 0; r < rows; ++r) {
      const CodeScale to = Numbers{row(r), n}.fit(magnitudes[r], largest, longest);
      factors[r] = to.factor;
      scales[r] = to.scale;
    }
    for (int r = 0; r < rows; ++r) Numbers{row(r), n}.round(factors[r], codes + r * stride);
  };
  if (n == 8 * kLanes) quantise_all(Numbers<8>{});
  else if (n == 4 * kLanes) quantise_all(Numbers<4>{});
  else quantise_all(Numbers<0>{});
}

// Moves sixteen rows of codes, (16, width), to lanes: (width / 2, 16, 2). Pairs are moved as floats.
CKDIST_INLINE void move_to_lanes(const int16_t* codes, int width, int16_t* lanes) {
  const int pairs = width / 2;
  for (int i = 0; i < pairs; i += kLanes) {
    const int count = pairs - i < kLanes ? pairs - i : kLanes;
    Vec tile[kLanes];
    for (int r = 0; r < kLanes; ++r) tile[r] = load_n(reinterpret_cast<const float*>(codes + r * width + 2 * i), count);
    transpose(tile);
    for (int j = 0; j < count; ++j) store(reinterpret_cast<float*>(lanes + (i + j) * 2 * kLanes), tile[j]);
  }
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
