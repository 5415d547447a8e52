// Weight types and the size of one block of each. They have GGUF's numbers (ggml_type). Types from kOwnTypes on exist
// only in safetensors: their blocks join codes and scales of two tensors.
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
  f8_e4m3 = 64,     // 8-bit floats, a float32 scale per 128 columns
  int4_32 = 65,     // a bfloat16 scale per 32 columns, codes around 8
  int4_32z = 66,    // a scale and a zero point per 32 columns
  int4_128z = 67,   // as int4_32z, per 128 columns
  nvfp4 = 68,       // FP4 codes, an E4M3 scale per 16 columns, times a float32
  f8_e4m3_32 = 69,  // 8-bit floats, a float32 scale per 32 columns
};

constexpr int kOwnTypes = 64;
constexpr int kTypeCount = 70;  // one past the largest number, for tables indexed by type

struct TypeTraits {
  const char* name;
  int block_elements;  // 0: an unknown type
  int block_bytes;
};

inline constexpr TypeTraits kUnknownType = {"?", 0, 0};

struct TypeTable {
  TypeTraits of[kTypeCount];

  constexpr TypeTable() : of() {
    for (TypeTraits& traits : of) traits = kUnknownType;
    const struct {
      Type type;
      TypeTraits traits;
    } known[] = {
        {Type::f32, {"F32", 1, 4}},
        {Type::f16, {"F16", 1, 2}},
        {Type::q4_0, {"Q4_0", 32, 18}},
        {Type::q4_1, {"Q4_1", 32, 20}},
        {Type::q5_0, {"Q5_0", 32, 22}},
        {Type::q5_1, {"Q5_1", 32, 24}},
        {Type::q8_0, {"Q8_0", 32, 34}},
        {Type::q2_k, {"Q2_K", 256, 84}},
        {Type::q3_k, {"Q3_K", 256, 110}},
        {Type::q4_k, {"Q4_K", 256, 144}},
        {Type::q5_k, {"Q5_K", 256, 176}},
        {Type::q6_k, {"Q6_K", 256, 210}},
        {Type::iq2_xxs, {"IQ2_XXS", 256, 66}},
        {Type::iq2_xs, {"IQ2_XS", 256, 74}},
        {Type::iq3_xxs, {"IQ3_XXS", 256, 98}},
        {Type::iq1_s, {"IQ1_S", 256, 50}},
        {Type::iq4_nl, {"IQ4_NL", 32, 18}},
        {Type::iq3_s, {"IQ3_S", 256, 110}},
        {Type::iq2_s, {"IQ2_S", 256, 82}},
        {Type::iq4_xs, {"IQ4_XS", 256, 136}},
        {Type::iq1_m, {"IQ1_M", 256, 56}},
        {Type::bf16, {"BF16", 1, 2}},
        {Type::tq1_0, {"TQ1_0", 256, 54}},
        {Type::tq2_0, {"TQ2_0", 256, 66}},
        {Type::mxfp4, {"MXFP4", 32, 17}},
        {Type::f8_e4m3, {"F8_E4M3", 32, 36}},
        {Type::int4_32, {"INT4_32", 32, 18}},
        {Type::int4_32z, {"INT4_32Z", 32, 20}},
        {Type::int4_128z, {"INT4_128Z", 32, 20}},
        {Type::nvfp4, {"NVFP4", 32, 22}},
        {Type::f8_e4m3_32, {"F8_E4M3_32", 32, 36}},
    };
    for (const auto& [type, traits] : known) of[static_cast<int>(type)] = traits;
  }
};
inline constexpr TypeTable kTypeTable;

constexpr const TypeTraits& type_traits(int32_t type) {
  return type >= 0 && type < kTypeCount ? kTypeTable.of[type] : kUnknownType;
}
constexpr const TypeTraits& type_traits(Type type) { return type_traits(static_cast<int32_t>(type)); }

}  // namespace ckdist
