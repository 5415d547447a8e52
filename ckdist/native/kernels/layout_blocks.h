// The block formats of GGUF files, read into one plain form: a byte per code, scales beside them.
// Field order and bit positions follow ggml's block structures; `type_traits` has their sizes.
#pragma once
#include <cstdint>

#include "kernels/layout.h"

namespace ckdist {

struct Block {
  uint8_t codes[256];  // unsigned, in column order
  uint16_t scale;      // float16 bits, or bfloat16: of the block, or of its one group
  uint16_t minimum;    // likewise; a value is scale * code - minimum
  uint32_t word;       // of zeroed and single scales
  uint8_t scales[16];  // of the groups, as ScaleKind says
  uint8_t minima[16];
};

// Fills what the type has; the rest stays as it is.
template <Type type>
void read_block(const uint8_t* source, Block& block);

// The values of one block, in the order of operations that defines them: (block scale * group scale) * code.
template <Type type>
void block_values(const Block& block, float* out);

// `cols` columns of one row, any type, in the file's own format. Slow and plain: embeddings and references use it.
using DequantizeRow = void (*)(const uint8_t* source, int64_t cols, float* out);
DequantizeRow dequantize_row_of(Type type);  // null for an unknown type

}  // namespace ckdist
