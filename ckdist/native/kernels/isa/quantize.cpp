// Quantises float32 rows to blocks. The search for Q4_K's scales and minima handles sixteen groups (two blocks) at a
// time, one per lane. The order of every sum is the same on every ISA.
#include "kernels/quantize.h"

#include "kernels/half.h"
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr int kGroup = 32;
constexpr int kGroups = 8;  // groups of a Q4_K block
constexpr int kBlock = kGroup * kGroups, kBlockBytes = 144;
constexpr float kLargestCode = 15.0f;
constexpr float kLargestScale = 63.0f;
constexpr int kTrials = 8;  // a larger number gives no measurable gain

void write16(uint8_t* at, uint16_t value) { std::memcpy(at, &value, sizeof value); }

uint32_t largest_bits(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

bool all_finite(const float* x, int64_t n) { return largest_bits(x, n) < 0x7f800000u; }
float largest_magnitude(const float* x, int64_t n) { return float_of_bits(largest_bits(x, n)); }

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

// Codes are chosen for the scale after rounding to float16, not for the exact one.
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

// Element i of sixteen groups.
struct Groups {
  Vec at[kGroup];
};

// Values are scale * code - minimum; scale and minimum are not negative.
struct Fit {
  Vec scale, minimum, error;
};

// A sum over a group has eight chains.
constexpr int kChains = 8;

CKDIST_INLINE Vec total(const Vec* s) { return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])); }

CKDIST_INLINE Vec nearest_code(Vec value) {
  return truncate(min(max(value, set(0.0f)), set(kLargestCode)) + set(0.5f));
}
CKDIST_INLINE Vec inverse_of(Vec scale) { return select(less(set(0.0f), scale), set(1.0f) / scale, set(0.0f)); }

// The weighted squared error of the best codes for a scale and a minimum.
Vec error_of(const Groups& x, const Groups& weight, Vec scale, Vec minimum) {
  const Vec inverse = inverse_of(scale);
  Vec chains[kChains];
  for (int chain = 0; chain < kChains; ++chain) {
    chains[chain] = set(0.0f);
    for (int i = chain; i < kGroup; i += kChains) {
      const Vec difference = scale * nearest_code((x.at[i] + minimum) * inverse) - minimum - x.at[i];
      chains[chain] = chains[chain] + weight.at[i] * difference * difference;
    }
  }
  return total(chains);
}

// The moments of the values for least squares, independent of the codes.
struct Moments {
  Vec w, wx;
};

// The least squares solution for the codes of a range: two normal equations. A negative minimum is set to zero.
Fit solve(const Groups& x, const Groups& weight, const Moments& moments, Vec low, Vec inverse) {
  Vec wq_chains[kChains], wqq_chains[kChains], wqx_chains[kChains];
  const Vec none = set(0.0f);
  for (int chain = 0; chain < kChains; ++chain) {
    Vec wq = none, wqq = none, wqx = none;
    for (int i = chain; i < kGroup; i += kChains) {
      const Vec q = nearest_code((x.at[i] - low) * inverse), weighted = weight.at[i] * q;
      wq = wq + weighted;
      wqq = wqq + weighted * q;
      wqx = wqx + weighted * x.at[i];
    }
    wq_chains[chain] = wq, wqq_chains[chain] = wqq, wqx_chains[chain] = wqx;
  }
  const Vec w = moments.w, wx = moments.wx, wq = total(wq_chains), wqq = total(wqq_chains), wqx = total(wqx_chains);
  const Vec determinant = w * wqq - wq * wq;
  const Mask solvable = less(none, determinant);
  const Vec at_zero = select(less(none, wqq), wqx / wqq, none);  // the scale if the minimum is zero
  const Vec scale = select(solvable, (w * wqx - wq * wx) / determinant, at_zero);
  const Vec minimum = select(solvable, (wq * wqx - wqq * wx) / determinant, none);
  return {max(select(less(minimum, none), at_zero, scale), none), max(minimum, none), none};
}

// Tries several ranges of 16 steps. Each gives codes, for which scale and minimum are solved.
Fit fit_groups(const Groups& x, const Groups& weight) {
  Vec low = set(0.0f), high = set(0.0f);  // the minimum is not negative, so the range always includes zero
  Moments moments = {set(0.0f), set(0.0f)};
  for (int i = 0; i < kGroup; ++i) {
    low = min(x.at[i], low), high = max(x.at[i], high);
    moments.w = moments.w + weight.at[i];
    moments.wx = moments.wx + weight.at[i] * x.at[i];
  }
  const Vec range = high - low;
  Fit best = {range / set(kLargestCode), set(0.0f) - low, set(0.0f)};
  best.error = error_of(x, weight, best.scale, best.minimum);
  for (int trial = 0; trial <= kTrials; ++trial) {
    const float steps = kLargestCode - 1.0f + 2.0f / kTrials * static_cast<float>(trial);
    Fit fit = solve(x, weight, moments, low, set(steps) / range);
    fit.error = error_of(x, weight, fit.scale, fit.minimum);
    const Mask better = less(fit.error, best.error);
    best = {select(better, fit.scale, best.scale), select(better, fit.minimum, best.minimum),
            select(better, fit.error, best.error)};
  }
  const Mask any = less(set(0.0f), range);
  return {select(any, best.scale, set(0.0f)), select(any, best.minimum, set(0.0f)), best.error};
}

CKDIST_INLINE Vec bounded_scale(Vec value) { return min(max(value, set(0.0f)), set(kLargestScale)); }

// The 6-bit scales and minima near the wanted ones with the smallest error together.
void round_fit(const Groups& x, const Groups& weight, const Fit& fit, Vec scale_step, Vec minimum_step, Vec* scale,
               Vec* minimum) {
  const Vec none = set(0.0f), half = set(0.5f);
  const Vec s = select(less(none, scale_step), truncate(fit.scale / scale_step + half), none);
  const Vec m = select(less(none, minimum_step), truncate(fit.minimum / minimum_step + half), none);
  Vec least = set(__builtin_inff());
  *scale = *minimum = none;
  for (int i = -1; i <= 1; ++i)
    for (int j = -1; j <= 1; ++j) {
      const Vec a = bounded_scale(s + set(static_cast<float>(i))), b = bounded_scale(m + set(static_cast<float>(j)));
      const Vec error = error_of(x, weight, scale_step * a, minimum_step * b);
      const Mask better = less(error, least);
      least = select(better, error, least);
      *scale = select(better, a, *scale);
      *minimum = select(better, b, *minimum);
    }
}

// Large values have larger weights, because they meet large activations more often than chance.
void weigh(const Groups& x, Groups& weight) {
  Vec squares = set(0.0f);
  for (int i = 0; i < kGroup; ++i) squares = squares + x.at[i] * x.at[i];
  float mean[kLanes];
  store(mean, squares);
  for (float& m : mean) m = __builtin_sqrtf(m / kGroup);
  for (int i = 0; i < kGroup; ++i) weight.at[i] = load(mean) + abs(x.at[i]);
}

void write_block(const uint8_t* scales, const uint8_t* minima, uint16_t scale_half, uint16_t minimum_half,
                 uint8_t* out) {
  write16(out, scale_half);
  write16(out + 2, minimum_half);
  for (int i = 0; i < 4; ++i) {
    out[4 + i] = static_cast<uint8_t>(scales[i] | scales[i + 4] >> 4 << 6);
    out[8 + i] = static_cast<uint8_t>(minima[i] | minima[i + 4] >> 4 << 6);
    out[12 + i] = static_cast<uint8_t>((scales[i + 4] & 0x0f) | (minima[i + 4] & 0x0f) << 4);
  }
}

// Writes the codes of two blocks, after their scales: round((value + shift) * inverse).
void write_codes(const Groups& values, Vec shift, Vec inverse, uint8_t* const (&out)[2]) {
  for (int part = 0; part < kGroup / kLanes; ++part) {
    Vec codes[kLanes];
    for (int i = 0; i < kLanes; ++i) codes[i] = nearest_code((values.at[part * kLanes + i] + shift) * inverse);
    transpose(codes);
    for (int lane = 0; lane < kLanes; lane += 2) {
      float pairs[kLanes];  // low and high nibbles
      store(pairs, codes[lane] + set(16.0f) * codes[lane + 1]);
      uint8_t* const at = out[lane / kGroups] + 16 + lane % kGroups / 2 * kGroup + part * kLanes;
      for (int i = 0; i < kLanes; ++i) at[i] = static_cast<uint8_t>(static_cast<int>(pairs[i]));
    }
  }
}

// Two blocks, which may be the same one.
bool quantize_blocks_q4_k(const float* const (&x)[2], uint8_t* const (&out)[2]) {
  // The search squares its values and multiplies the squares. In units of the largest value none can overflow or
  // vanish.
  float units[2], unit_lanes[kLanes];
  for (int b = 0; b < 2; ++b) {
    const float largest = largest_magnitude(x[b], kBlock);
    if (largest > kLargestHalf) return false;
    units[b] = largest > 0 ? largest : 1;
    for (int g = 0; g < kGroups; ++g) unit_lanes[b * kGroups + g] = units[b];
  }
  Groups values, weights;
  for (int part = 0; part < kGroup / kLanes; ++part) {
    Vec(&transposed)[kLanes] = reinterpret_cast<Vec(&)[kLanes]>(values.at[part * kLanes]);
    for (int lane = 0; lane < kLanes; ++lane)
      transposed[lane] = load(x[lane / kGroups] + lane % kGroups * kGroup + part * kLanes);
    transpose(transposed);
    for (Vec& v : transposed) v = v / load(unit_lanes);
  }
  weigh(values, weights);
  const Fit fit = fit_groups(values, weights);

  float scales[kLanes], minima[kLanes], scale_steps[kLanes], minimum_steps[kLanes];
  uint16_t scale_halves[2], minimum_halves[2];
  store(scales, fit.scale);
  store(minima, fit.minimum);
  for (int b = 0; b < 2; ++b) {
    scale_halves[b] = half_of_float(largest_magnitude(scales + b * kGroups, kGroups) * units[b] / kLargestScale);
    minimum_halves[b] = half_of_float(largest_magnitude(minima + b * kGroups, kGroups) * units[b] / kLargestScale);
    if (scale_halves[b] >= 0x7c00 || minimum_halves[b] >= 0x7c00) return false;
    for (int lane = b * kGroups; lane < (b + 1) * kGroups; ++lane) {
      scale_steps[lane] = float_of_half(scale_halves[b]) / units[b];
      minimum_steps[lane] = float_of_half(minimum_halves[b]) / units[b];
    }
  }
  Vec scale, minimum;
  round_fit(values, weights, fit, load(scale_steps), load(minimum_steps), &scale, &minimum);
  const Vec inverse = inverse_of(load(scale_steps) * scale), shift = load(minimum_steps) * minimum;

  uint8_t bytes[2][kLanes];  // scales and minima
  store(scales, scale);
  store(minima, minimum);
  for (int lane = 0; lane < kLanes; ++lane) {
    bytes[0][lane] = static_cast<uint8_t>(static_cast<int>(scales[lane]));
    bytes[1][lane] = static_cast<uint8_t>(static_cast<int>(minima[lane]));
  }
  for (int b = 0; b < 2; ++b)
    write_block(bytes[0] + b * kGroups, bytes[1] + b * kGroups, scale_halves[b], minimum_halves[b], out[b]);
  write_codes(values, shift, inverse, out);
  return true;
}

bool quantize_q4_k(const float* x, int64_t cols, uint8_t* out) {
  if (!all_finite(x, cols)) return false;
  const int64_t blocks = cols / kBlock;
  for (int64_t block = 0; block < blocks; block += 2) {
    const int64_t other = block + 1 < blocks ? block + 1 : block;
    if (!quantize_blocks_q4_k({x + block * kBlock, x + other * kBlock},
                              {out + block * kBlockBytes, out + other * kBlockBytes}))
      return false;
  }
  return true;
}

}  // namespace

extern const QuantizeKernel quantize_kernel = {quantize_float<half_of_float>, quantize_float<bf16_of_float>,
                                               quantize_q8_0, quantize_q4_k};

}  // namespace CKDIST_ISA
}  // namespace ckdist
