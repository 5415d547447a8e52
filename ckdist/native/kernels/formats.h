// The activation format of a product, by level and type of the weights. The table has the levels of every architecture,
// so that a plan for another machine does not depend on this build or this CPU. The kernels under isa/ take their
// format from here.
#pragma once
#include "kernels/layout.h"
#include "kernels/linear.h"

namespace ckdist {

// How a level multiplies floats of 16 and 8 bits: in pairs of bfloat16, or expanded to float32. All levels multiply
// bytes as bytes.
struct LevelFormats {
  const char* name;
  bool bf16_pairs;
  bool float8_pairs;
  bool tiles = false;  // prompts are multiplied in tiles of bfloat16
};

constexpr LevelFormats kLevelFormats[] = {
    {"baseline", false, false},     {"avx2", false, false},      {"avx2_vnni", false, false}, {"avx512", false, false},
    {"avx512_vnni", false, false},  {"avx512_bf16", true, true}, {"amx", true, true, true},   {"neon", false, false},
    {"neon_dotprod", false, false}, {"neon_i8mm", false, false}, {"neon_bf16", true, false},
};

constexpr bool same_text(const char* a, const char* b) {
  for (; *a && *a == *b; ++a, ++b) {}
  return *a == *b;
}

// The level of this name; null if none has it.
constexpr const LevelFormats* level_formats(const char* name) {
  for (const LevelFormats& level : kLevelFormats)
    if (same_text(level.name, name)) return &level;
  return nullptr;
}

constexpr ActivationFormat activation_format(const LevelFormats& level, Type type) {
  if (type == Type::bf16) return level.bf16_pairs ? ActivationFormat::bf16 : ActivationFormat::f32;
  if (is_float8(type)) return level.float8_pairs ? ActivationFormat::bf16 : ActivationFormat::f32;
  return layout_of(type).columns ? ActivationFormat::q8 : ActivationFormat::f32;
}

// The format for rows of prompts.
constexpr ActivationFormat prompt_format(const LevelFormats& level, Type type) {
  const ActivationFormat format = activation_format(level, type);
  return level.tiles && format == ActivationFormat::q8 ? ActivationFormat::bf16 : format;
}

}  // namespace ckdist
