// The places of the largest of many scores.
#pragma once
#include <cstdint>
#include <cstring>

namespace ckdist {

// The order of floats as whole numbers. NaN has a place in it, so that it leads to a list like any other.
inline uint32_t ordered(float x) {
  uint32_t bits;
  x += 0.f;  // -0 becomes +0
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// out = the k positions of n with the largest scores, ascending; of equal scores the lower position. k < n. The k-th
// largest number is found digit by digit.
inline void select_largest(const float* scores, int64_t n, int64_t k, int32_t* out) {
  constexpr int kBits[] = {11, 11, 10};
  uint32_t prefix = 0;
  int shift = 32;
  int64_t left = k;  // of the numbers that begin with `prefix`
  for (const int bits : kBits) {
    int64_t counts[1 << 11] = {};
    const int before = shift;
    shift -= bits;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t number = ordered(scores[i]);
      if (before == 32 || number >> before == prefix) counts[number >> shift & ((1u << bits) - 1)]++;
    }
    int64_t digit = (int64_t{1} << bits) - 1;
    for (; counts[digit] < left; digit--) left -= counts[digit];
    prefix = prefix << bits | uint32_t(digit);
  }
  for (int64_t i = 0; i < n; i++) {
    const uint32_t number = ordered(scores[i]);
    if (number > prefix || (number == prefix && left-- > 0)) *out++ = int32_t(i);
  }
}

}  // namespace ckdist
