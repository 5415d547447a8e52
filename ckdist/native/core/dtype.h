// Weight types, numbered as GGUF numbers them (ggml_type), and the size of one block of each.
#pragma once
#include <cstdint>

namespace ckdist {

enum class Type : int32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
};

constexpr int kTypeCount = 40;  // one past the largest number, for tables indexed by type

struct TypeTraits {
  const char* name;
  int block_elements;  // 0: not a known type
  int block_bytes;
};

inline constexpr TypeTraits kUnknownType = {"?", 0, 0};
inline constexpr TypeTraits kTypeTraits[kTypeCount] = {
    {"F32", 1, 4},      {"F16", 1, 2},        {"Q4_0", 32, 18},    {"Q4_1", 32, 20},     kUnknownType,
    kUnknownType,       {"Q5_0", 32, 22},     {"Q5_1", 32, 24},    {"Q8_0", 32, 34},     kUnknownType,
    {"Q2_K", 256, 84},  {"Q3_K", 256, 110},   {"Q4_K", 256, 144},  {"Q5_K", 256, 176},   {"Q6_K", 256, 210},
    kUnknownType,       {"IQ2_XXS", 256, 66}, {"IQ2_XS", 256, 74}, {"IQ3_XXS", 256, 98}, {"IQ1_S", 256, 50},
    {"IQ4_NL", 32, 18}, {"IQ3_S", 256, 110},  {"IQ2_S", 256, 82},  {"IQ4_XS", 256, 136}, kUnknownType,
    kUnknownType,       kUnknownType,         kUnknownType,        kUnknownType,         {"IQ1_M", 256, 56},
    {"BF16", 1, 2},     kUnknownType,         kUnknownType,        kUnknownType,         {"TQ1_0", 256, 54},
    {"TQ2_0", 256, 66}, kUnknownType,         kUnknownType,        kUnknownType,         {"MXFP4", 32, 17}};

constexpr const TypeTraits& type_traits(int32_t type) {
  return type >= 0 && type < kTypeCount ? kTypeTraits[type] : kUnknownType;
}
constexpr const TypeTraits& type_traits(Type type) { return type_traits(static_cast<int32_t>(type)); }

}  // namespace ckdist
