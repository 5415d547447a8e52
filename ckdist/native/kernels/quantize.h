// Quantises float32 rows to the file's block formats, for models that are quantised during loading.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace ckdist {

// `cols` floats, a multiple of the type's block, to blocks. Returns false if a value is not finite or too large for the
// type. The bytes are the same on every ISA.
using QuantizeRow = bool (*)(const float* x, int64_t cols, uint8_t* out);

struct QuantizeKernel {
  QuantizeRow f16, bf16, q8_0, q4_k;

  QuantizeRow of(Type type) const {  // null for other types
    return type == Type::f16    ? f16
           : type == Type::bf16 ? bf16
           : type == Type::q8_0 ? q8_0
           : type == Type::q4_k ? q4_k
                                : nullptr;
  }
};

}  // namespace ckdist
