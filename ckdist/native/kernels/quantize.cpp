#pragma GCC optimize("no-trapping-math")  // or comparisons of floats keep their branches and nothing is vectorised
#include "kernels/quantize.h"

#include <cmath>
#include <cstring>

#include "kernels/half.h"

namespace ckdist {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr int kGroup = 32;
constexpr int kGroups = 8;       // of a Q4_K block
constexpr int kLargestCode = 15;
constexpr int kLargestScale = 63;
constexpr int kTrials = 8;      // more of them gain nothing that can be measured

void write16(uint8_t* at, uint16_t value) { std::memcpy(at, &value, sizeof value); }

bool all_finite(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7f800000u;
}

float largest_magnitude(const float* x, int n) {
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  return largest;
}

template <uint16_t (*convert)(float)>
bool quantize_float(const float* x, int64_t cols, uint8_t* out) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const uint16_t value = convert(x[i]);
    largest = (value & 0x7fff) > largest ? value & 0x7fff : largest;
    write16(out + 2 * i, value);
  }
  return largest < (convert == half_of_float ? 0x7c00 : 0x7f80);
}

// Codes are chosen for the scale as float16 holds it, not for the exact one.
bool quantize_q8_0(const float* x, int64_t cols, uint8_t* out) {
  if (!all_finite(x, cols)) return false;
  for (int64_t start = 0; start < cols; start += kGroup, x += kGroup, out += 34) {
    const float exact = largest_magnitude(x, kGroup) / 127.0f;
    if (exact > kLargestHalf) return false;
    const uint16_t half = half_of_float(exact);
    const float scale = float_of_half(half);
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    write16(out, half);
    for (int i = 0; i < kGroup; ++i) {
      float code = x[i] * inverse;
      code = code > 127 ? 127 : code < -127 ? -127 : code;
      out[2 + i] = static_cast<uint8_t>(static_cast<int>(code + (code < 0 ? -0.5f : 0.5f)));
    }
  }
  return true;
}

// A group of 32 values as scale * code - minimum, both not negative.
struct Fit {
  float scale, minimum, error;
};

// Sums over a group run in eight lanes, which a compiler can vectorise without reordering them.
constexpr int kLanes = 8;

struct Sum {
  float lane[kLanes] = {};
  float total() const {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }
};

inline int nearest_code(float value) {
  value = value > 0 ? value : 0.0f;
  value = value < kLargestCode ? value : static_cast<float>(kLargestCode);
  return static_cast<int>(value + 0.5f);
}

// The weighted squared error of the best codes for a scale and a minimum.
float error_of(const float* x, const float* weight, float scale, float minimum) {
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  Sum error;
  for (int i = 0; i < kGroup; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float difference = scale * static_cast<float>(nearest_code((x[i + l] + minimum) * inverse)) - minimum - x[i + l];
      error.lane[l] += weight[i + l] * difference * difference;
    }
  return error.total();
}

// What least squares needs of the values, whatever the codes.
struct Moments {
  float w = 0, wx = 0;
};

// The least squares solution for the codes that a range gives: two normal equations; a minimum below zero is held at zero.
Fit solve(const float* x, const float* weight, const Moments& moments, float low, float inverse) {
  Sum wq_sum, wqq_sum, wqx_sum;
  for (int i = 0; i < kGroup; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float q = static_cast<float>(nearest_code((x[i + l] - low) * inverse));
      const float weighted = weight[i + l] * q;
      wq_sum.lane[l] += weighted;
      wqq_sum.lane[l] += weighted * q;
      wqx_sum.lane[l] += weighted * x[i + l];
    }
  const float w = moments.w, wx = moments.wx, wq = wq_sum.total(), wqq = wqq_sum.total(), wqx = wqx_sum.total();
  Fit fit = {0, 0, 0};
  const float determinant = w * wqq - wq * wq;
  if (determinant > 0) {
    fit.scale = (w * wqx - wq * wx) / determinant;
    fit.minimum = (wq * wqx - wqq * wx) / determinant;
  }
  if (fit.minimum < 0 || determinant <= 0) {
    fit.minimum = 0;
    fit.scale = wqq > 0 ? wqx / wqq : 0;
  }
  if (!(fit.scale >= 0)) fit.scale = 0;
  return fit;
}

// Tries several ways to lay 16 steps over the range; each gives codes, for which scale and minimum are solved.
Fit fit_group(const float* x, const float* weight) {
  float low = 0, high = 0;  // the minimum is not negative, so zero is always in the range
  for (int i = 0; i < kGroup; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  if (!(high - low > 0)) return {0, 0, 0};
  Fit best = {(high - low) / kLargestCode, -low, 0};
  best.error = error_of(x, weight, best.scale, best.minimum);
  Moments moments;
  for (int i = 0; i < kGroup; ++i) moments.w += weight[i], moments.wx += weight[i] * x[i];
  for (int trial = 0; trial <= kTrials; ++trial) {
    const float steps = kLargestCode - 1.0f + 2.0f / kTrials * static_cast<float>(trial);
    Fit fit = solve(x, weight, moments, low, steps / (high - low));
    fit.error = error_of(x, weight, fit.scale, fit.minimum);
    if (fit.error < best.error) best = fit;
  }
  return best;
}

int bounded_scale(int value) { return value < 0 ? 0 : value > kLargestScale ? kLargestScale : value; }

// 6-bit scales and minima near the wanted ones, that together err least.
void round_fit(const float* x, const float* weight, const Fit& fit, float scale_step, float minimum_step, uint8_t* scale, uint8_t* minimum) {
  const int s = scale_step > 0 ? static_cast<int>(fit.scale / scale_step + 0.5f) : 0;
  const int m = minimum_step > 0 ? static_cast<int>(fit.minimum / minimum_step + 0.5f) : 0;
  float least = INFINITY;
  for (int i = bounded_scale(s - 1); i <= bounded_scale(s + 1); ++i)
    for (int j = bounded_scale(m - 1); j <= bounded_scale(m + 1); ++j) {
      const float error = error_of(x, weight, scale_step * static_cast<float>(i), minimum_step * static_cast<float>(j));
      if (error < least) {
        least = error;
        *scale = static_cast<uint8_t>(i);
        *minimum = static_cast<uint8_t>(j);
      }
    }
}

// Large values weigh more: they meet large activations more often than chance would have it.
void weigh(const float* x, float* weight) {
  float squares = 0;
  for (int i = 0; i < kGroup; ++i) squares += x[i] * x[i];
  const float mean = std::sqrt(squares / kGroup);
  for (int i = 0; i < kGroup; ++i) weight[i] = mean + std::fabs(x[i]);
}

bool quantize_block_q4_k(const float* x, uint8_t* out) {
  // The search squares its values and multiplies the squares; in units of the largest value none can overflow or vanish.
  const float unit = largest_magnitude(x, kGroup * kGroups);
  std::memset(out, 0, 144);
  if (unit == 0) return true;
  if (unit > kLargestHalf) return false;
  float scaled[kGroup * kGroups], weights[kGroups][kGroup];
  for (int i = 0; i < kGroup * kGroups; ++i) scaled[i] = x[i] / unit;
  Fit fits[kGroups];
  float scale = 0, minimum = 0;
  for (int g = 0; g < kGroups; ++g) {
    weigh(scaled + kGroup * g, weights[g]);
    fits[g] = fit_group(scaled + kGroup * g, weights[g]);
    scale = fits[g].scale > scale ? fits[g].scale : scale;
    minimum = fits[g].minimum > minimum ? fits[g].minimum : minimum;
  }
  const uint16_t scale_half = half_of_float(scale * unit / kLargestScale), minimum_half = half_of_float(minimum * unit / kLargestScale);
  if (scale_half >= 0x7c00 || minimum_half >= 0x7c00) return false;
  const float scale_step = float_of_half(scale_half) / unit, minimum_step = float_of_half(minimum_half) / unit;
  uint8_t scales[kGroups], minima[kGroups], codes[kGroups][kGroup];
  for (int g = 0; g < kGroups; ++g) {
    round_fit(scaled + kGroup * g, weights[g], fits[g], scale_step, minimum_step, &scales[g], &minima[g]);
    const float step = scale_step * scales[g], shift = minimum_step * minima[g];
    const float inverse = step > 0 ? 1.0f / step : 0.0f;
    for (int i = 0; i < kGroup; ++i) codes[g][i] = static_cast<uint8_t>(nearest_code((scaled[kGroup * g + i] + shift) * inverse));
  }
  write16(out, scale_half);
  write16(out + 2, minimum_half);
  for (int i = 0; i < 4; ++i) {
    out[4 + i] = static_cast<uint8_t>(scales[i] | scales[i + 4] >> 4 << 6);
    out[8 + i] = static_cast<uint8_t>(minima[i] | minima[i + 4] >> 4 << 6);
    out[12 + i] = static_cast<uint8_t>((scales[i + 4] & 0x0f) | (minima[i + 4] & 0x0f) << 4);
  }
  for (int g = 0; g < kGroups; ++g)
    for (int i = 0; i < kGroup; ++i) out[16 + kGroup * (g / 2) + i] |= static_cast<uint8_t>(codes[g][i] << (4 * (g % 2)));
  return true;
}

bool quantize_q4_k(const float* x, int64_t cols, uint8_t* out) {
  if (!all_finite(x, cols)) return false;
  for (int64_t start = 0; start < cols; start += kGroup * kGroups, out += 144)
    if (!quantize_block_q4_k(x + start, out)) return false;
  return true;
}

}  // namespace

QuantizeRow quantize_row_of(Type type) {
  switch (type) {
    case Type::f16: return quantize_float<half_of_float>;
    case Type::bf16: return quantize_float<bf16_of_float>;
    case Type::q8_0: return quantize_q8_0;
    case Type::q4_k: return quantize_q4_k;
    default: return nullptr;
  }
}

}  // namespace ckdist
