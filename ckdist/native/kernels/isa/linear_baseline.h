// Strips in portable C++, which the compiler vectorises for the target. Codes are converted to small whole floats.
// Their products and sums over 32 columns are exact, so blocked types give the results of integer arithmetic.
#pragma once
#include <cstring>

#include "kernels/half.h"
#include "kernels/isa/linear_strip.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kMaxTokens = 16;
constexpr int kSteps = kGroupColumns / 4;
constexpr int kVector = kTileRows * 4;  // codes of one step

struct Rows {
  float lane[kTileRows];
};

inline void store_sums(const Strip& strip, const Rows* sums) {
  for (int t = 0; t < strip.tokens; ++t)
    std::memcpy(strip.y + t * strip.y_stride, sums[t].lane, strip.rows * sizeof(float));
}

// The codes of 32 columns without offset, as [step][row][4].
template <Type type>
void read_codes(const uint8_t* planes, float (*codes)[kVector]) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int low_parts = 8 / layout.low_bits;
  constexpr int low_mask = (1 << layout.low_bits) - 1;
  if constexpr (layout.low_bits == 6) {
    for (int step = 0; step < kSteps; ++step)
      for (int i = 0; i < kVector; ++i) {
        const uint8_t* three = planes + 3 * kVector * (step / 4) + i;
        const int code = step % 4 < 3 ? three[kVector * (step % 4)] & 0x3f
                                      : three[0] >> 6 | three[kVector] >> 6 << 2 | three[2 * kVector] >> 6 << 4;
        codes[step][i] = static_cast<float>(code - layout.offset);
      }
    return;
  }
  for (int step = 0; step < kSteps; ++step) {
    const int vector = layout.low_bits == 4 ? step % 4 : step / low_parts;
    const int shift = layout.low_bits * (layout.low_bits == 4 ? step / 4 : step % low_parts);
    const uint8_t* low = planes + kVector * vector;
    for (int i = 0; i < kVector; ++i) {
      int code = low[i] >> shift & low_mask;
      if constexpr (layout.high_bits > 0) {
        constexpr int high_parts = 8 / layout.high_bits;
        const uint8_t* high = planes + layout.low_bytes() + kVector * (step / high_parts);
        code |= (high[i] >> (layout.high_bits * (step % high_parts)) & ((1 << layout.high_bits) - 1))
                << layout.low_bits;
      }
      codes[step][i] = static_cast<float>((layout.codebook ? codebook_of(type)[code] : code) - layout.offset);
    }
  }
}

inline Rows read_halves(const uint8_t* at) {
  Rows rows;
  for (int r = 0; r < kTileRows; ++r) {
    uint16_t half = read_as<uint16_t>(at + 2 * r);
    rows.lane[r] = float_of_half(half);
  }
  return rows;
}

template <Type type>
void read_scales(const uint8_t* block, const Rows& block_scale, const Rows& block_minimum, int group, Rows& scale,
                 Rows& minimum) {
  constexpr BlockLayout layout = layout_of(type);
  const uint8_t* scales = block + layout.group_scales() + layout.scale_of(group) * layout.group_scale_bytes();
  const uint8_t* minima = block + layout.group_minima() + group * layout.group_scale_bytes();
  if constexpr (layout.scales == ScaleKind::half) {
    scale = read_halves(scales);
    if (layout.minimum) minimum = read_halves(minima);
    return;
  }
  for (int r = 0; r < kTileRows; ++r) {
    if constexpr (layout.scales == ScaleKind::bfloat) {
      uint16_t bits = read_as<uint16_t>(scales + 2 * r);
      scale.lane[r] = float_of_bf16(bits);
    } else if constexpr (layout.scales == ScaleKind::zeroed) {
      uint32_t word = read_as<uint32_t>(scales + 4 * r);
      scale.lane[r] = float_of_bits(word & ~kZeroPoint);
      minimum.lane[r] = scale.lane[r] * static_cast<float>(word & kZeroPoint);
    } else if (layout.scales == ScaleKind::exponent) {
      scale.lane[r] = float_of_exponent(scales[r]);
    } else if (layout.scales == ScaleKind::float8) {
      scale.lane[r] = block_scale.lane[r] * float_of_shifted_scale(scales[r]);
    } else if (layout.scales == ScaleKind::unsigned_byte) {
      scale.lane[r] = block_scale.lane[r] * scales[r];
      minimum.lane[r] =
          block_minimum.lane[r] * block[layout.group_minima() + group / 4 * 4 * kTileRows + 4 * r + group % 4];
    } else if (layout.scales == ScaleKind::signed_byte || layout.scales == ScaleKind::expanded) {
      scale.lane[r] = block_scale.lane[r] * static_cast<int8_t>(scales[r]);
    } else {
      scale.lane[r] = block_scale.lane[r] * (scales[r] & 0x0f);
      minimum.lane[r] = block_minimum.lane[r] * (scales[r] >> 4);
    }
  }
}

// Four floats, a type that gcc and clang support on every target.
using Four = float __attribute__((vector_size(16)));

inline Four four(const float* at) { return read_as<Four>(at); }

// out[r] = sum over steps [0, steps) of codes . x, exact.
inline void dot(const float (*codes)[kVector], const float (*x)[4], int steps, Rows& out) {
  for (int r = 0; r < kTileRows; ++r) {
    Four lanes = {};
    for (int step = 0; step < steps; ++step) lanes += four(codes[step] + 4 * r) * four(x[step]);
    out.lane[r] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
}

template <Type type>
void block_strip(const Strip& strip) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int parts = layout.parts();  // scales within 32 columns
  Rows sums[kMaxTokens] = {};
  ExpandedBlocks<type> expanded;
  expanded.begin(strip.tile, strip.expand, strip.block_bytes);
  for (int64_t b = 0; b < strip.blocks; ++b) {
    const uint8_t* block = strip.tile + b * layout.bytes();
    if constexpr (expanded.used) block = expanded.template next<kMaxTokens>();
    Rows block_scale, block_minimum;
    if constexpr (layout.scales == ScaleKind::expanded || layout.scales == ScaleKind::float8) {
      std::memcpy(&block_scale, block + layout.block_scale(), sizeof block_scale);
    } else if constexpr (!layout.alone()) {
      block_scale = read_halves(block + layout.block_scale());
      if (layout.minimum) block_minimum = read_halves(block + layout.block_minimum());
    }
    for (int g = 0; g < layout.columns / kGroupColumns; ++g) {
      float codes[kSteps][kVector];
      Rows scale[parts], minimum[parts];
      read_codes<type>(block + layout.planes() + g * layout.plane_bytes(), codes);
      for (int p = 0; p < parts; ++p)
        read_scales<type>(block, block_scale, block_minimum, g * parts + p, scale[p], minimum[p]);
      const int64_t group = (strip.column + b * layout.columns) / kGroupColumns + g;
      for (int t = 0; t < strip.tokens; ++t) {
        const uint8_t* row = strip.x + t * strip.x_stride;
        const int8_t* x_codes = reinterpret_cast<const int8_t*>(row) + group * kGroupColumns;
        const float x_scale = reinterpret_cast<const float*>(row + ActivationRow::scales(strip.padded))[group];
        const int32_t* x_sums = reinterpret_cast<const int32_t*>(row + ActivationRow::sums16(strip.padded)) + 2 * group;
        float x[kSteps][4];
        for (int i = 0; i < kGroupColumns; ++i) x[i / 4][i % 4] = x_codes[i];
        Rows total = {};
        for (int p = 0; p < parts; ++p) {
          Rows product;
          dot(codes + p * kSteps / parts, x + p * kSteps / parts, kSteps / parts, product);
          const float x_sum =
              static_cast<float>((parts == 1 ? x_sums[0] + x_sums[1] : x_sums[p]) / kSums16Factor);  // negative
          for (int r = 0; r < kTileRows; ++r) {
            const float value = product.lane[r] * scale[p].lane[r];
            total.lane[r] += layout.minimum ? value + minimum[p].lane[r] * x_sum : value;
          }
        }
        for (int r = 0; r < kTileRows; ++r) sums[t].lane[r] += total.lane[r] * x_scale;
      }
    }
  }
  store_sums(strip, sums);
}

template <Type type>
float read_float(const uint8_t* tile, int64_t index) {
  if constexpr (type == Type::f32) return reinterpret_cast<const float*>(tile)[index];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(tile)[index];
  return type == Type::f16 ? float_of_half(bits) : float_of_bf16(bits);
}

template <Type type>
void float_strip(const Strip& strip) {
  constexpr int depth = type == Type::bf16 ? 2 : 1;
  Rows sums[kMaxTokens] = {};
  for (int64_t b = 0; b < strip.blocks; ++b) {
    float weights[kFloatColumnPad][kTileRows];
    for (int c = 0; c < kFloatColumnPad; ++c)
      for (int r = 0; r < kTileRows; ++r)
        weights[c][r] =
            read_float<type>(strip.tile, ((b * kFloatColumnPad + c) / depth * kTileRows + r) * depth + c % depth);
    const int64_t column = b * kFloatColumnPad;
    for (int t = 0; t < strip.tokens; ++t) {
      const float* x = reinterpret_cast<const float*>(strip.x + t * strip.x_stride) + column;
      for (int r = 0; r < kTileRows; r += 4) {
        Four sum = four(sums[t].lane + r);
        for (int c = 0; c < kFloatColumnPad; ++c) sum += four(weights[c] + r) * x[c];
        std::memcpy(sums[t].lane + r, &sum, sizeof sum);
      }
    }
  }
  store_sums(strip, sums);
}

template <Type type>
struct Product {
  static constexpr Type kType = type;
  static constexpr BlockLayout layout = layout_of(type);
  static constexpr int kBlockColumns = layout.columns ? layout.columns : kFloatColumnPad;

  static StripFunction strip(int64_t tokens, int64_t) {
    void (*run)(const Strip&);
    if constexpr (layout.columns > 0) run = block_strip<form_of(type)>;
    else run = float_strip<type>;
    return {static_cast<int>(tokens < kMaxTokens ? tokens : kMaxTokens), 1, run};
  }
};

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
