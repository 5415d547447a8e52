// float32 rows into the file's block formats, for models that are quantised as they are loaded.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace ckdist {

// `cols` floats, a multiple of the type's block, into blocks. False where a value is not finite or too large for the type.
using QuantizeRow = bool (*)(const float* x, int64_t cols, uint8_t* out);
QuantizeRow quantize_row_of(Type type);  // F16, BF16, Q8_0 and Q4_K; else null

}  // namespace ckdist
