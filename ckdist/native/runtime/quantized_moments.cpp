// AdamW whose moments have 8 bits: block-wise dynamic quantisation (Dettmers et al. 2021, arXiv:2110.02861).
//
// A block of 256 elements has a scale: its element with the largest magnitude, with its sign. So this element has the
// code of 1, and codes that are quantised again do not change.
#include <array>
#include <cmath>

#include "runtime/optimizer_pass.h"

namespace ckdist {
namespace {

constexpr int64_t kBlock = 256;
constexpr int kCodes = 256, kExponents = 7;

// The values of the codes, ascending, and the middles between neighbours. A decade of exponent e has 2^e (signed) or
// 2^(e + 1) values, the middles of equal parts of [0.1, 1].
struct Codes {
  std::array<float, kCodes> values;
  std::array<float, kCodes - 1> middles;
  explicit Codes(bool is_signed) {
    int at = 0;
    values[size_t(at++)] = 0, values[size_t(at++)] = 1;
    for (int e = 0; e < kExponents; ++e) {
      const int parts = is_signed ? 1 << e : 2 << e;
      for (int part = 0; part < parts; ++part) {
        const double value = std::pow(10.0, e - kExponents + 1) * (0.1 + 0.9 * (part + 0.5) / parts);
        values[size_t(at++)] = float(value);
        if (is_signed) values[size_t(at++)] = float(-value);
      }
    }
    std::sort(values.begin(), values.end());
    for (size_t i = 0; i + 1 < values.size(); ++i) middles[i] = (values[i] + values[i + 1]) / 2;
  }
  uint8_t nearest(float x) const {
    int at = 0;
    for (int step = kCodes / 2; step; step /= 2)
      if (x > middles[size_t(at + step - 1)]) at += step;
    return uint8_t(at);
  }
};

// Writes the codes of x[0 .. n) and returns their scale.
float quantise(const Codes& codes, const float* x, int64_t n, uint8_t* out) {
  float scale = 0;
  for (int64_t i = 0; i < n; ++i)
    if (std::fabs(x[i]) > std::fabs(scale)) scale = x[i];
  for (int64_t i = 0; i < n; ++i) out[i] = codes.nearest(scale != 0 ? x[i] / scale : 0.f);
  return scale;
}

}  // namespace

void Optimizer::adamw_8bit(const AdamwNumbers& numbers, const ckdist_update& update, const QuantizedMoment& mean,
                           const QuantizedMoment& square) {
  static const Codes both(true), positive(false);
  each_part(update.n, kBlock, [&](int64_t at, int64_t end) {
    float m[kBlock], v[kBlock];
    const int64_t b = at / kBlock, count = end - at;
    for (int64_t i = 0; i < count; ++i) {
      m[i] = both.values[mean.codes[at + i]] * mean.scales[b];
      v[i] = positive.values[square.codes[at + i]] * square.scales[b];
    }
    parameters(update).each(0, at, count, [&](float* p, int64_t first, int64_t some) {
      kernels_.optimizer.adamw(numbers, p, update.gradients + first, m + (first - at), v + (first - at), some);
    });
    mean.scales[b] = quantise(both, m, count, mean.codes + at);
    square.scales[b] = quantise(positive, v, count, square.codes + at);
  });
}

}  // namespace ckdist
