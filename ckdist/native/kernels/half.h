// Conversions between float and the bit patterns of float16 and bfloat16, one number at a time, in portable C++.
// Kernels use vector instructions instead. All functions are static: they are compiled for several ISAs, and the linker
// must not merge them.
#pragma once
#include <cstdint>

#include "core/read_as.h"

namespace ckdist {

static inline float float_of_bits(uint32_t bits) { return read_as<float>(&bits); }

static inline uint32_t bits_of_float(float value) { return read_as<uint32_t>(&value); }

static inline float float_of_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
static inline uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The bits of a half's exponent and mantissa, shifted to a float's position, are the half's value * 2^-112. The product
// also normalises subnormal numbers.
static inline float float_of_half(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const float scaled = float_of_bits(magnitude) * float_of_bits(0x77800000u);  // 2^112
  const uint32_t bits =
      magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits_of_float(scaled);  // infinities and NaNs
  return float_of_bits(bits | sign);
}

// 8-bit floats with 4 bits of exponent and 3 of mantissa, without infinities (E4M3FN). The magnitude, shifted to a
// float's position, is the value * 2^-120. Two codes are NaN; files must not contain them (runtime/joined_rows.h).
static inline float float_of_e4m3(uint8_t bits) {
  const float scaled = float_of_bits((bits & 0x7fu) << 20) * float_of_bits(0x7b800000u);  // 2^120
  return float_of_bits(bits_of_float(scaled) | (bits & 0x80u) << 24);
}

// A scale of NVFP4 as it is packed: E4M3 without sign as five bits of exponent and three of mantissa, since products
// with subnormal floats are slow. Shifted to a float's position, it is the value * 2^-117; 0 is 0.
constexpr int kScaleShift = 20;
static inline float float_of_shifted_scale(uint8_t bits) {
  return float_of_bits(static_cast<uint32_t>(bits) << kScaleShift);
}
static inline uint8_t scale_of_e4m3(uint8_t code) {
  constexpr uint8_t subnormal[8] = {0, 8, 16, 20, 24, 26, 28, 30};
  return code < 8 ? subnormal[code] : static_cast<uint8_t>(code + 24);
}

// 2^(exponent - 128), which is E8M0 / 2. The two smallest values are subnormal numbers.
constexpr uint32_t kLeastPower = 0x00200000u;  // 2^-128
static inline float float_of_exponent(uint8_t exponent) {
  return float_of_bits(exponent < 2 ? kLeastPower << exponent : static_cast<uint32_t>(exponent - 1) << 23);
}

// Rounds to nearest even. Adding a power of two makes the float adder drop exactly the bits that a half does not have.
static inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, a multiple of 2^-24
    const float rounded = float_of_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(rounded) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace ckdist
