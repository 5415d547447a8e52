// Reads the block formats of GGUF files to one plain form: a byte per code, and separate scales. Field order and bit
// positions are those of ggml's block structures; `type_traits` has their sizes.
#pragma once
#include <cstdint>

#include "kernels/layout.h"

namespace ckdist {

struct Block {
  uint8_t codes[256];  // unsigned, in column order
  uint16_t scale;      // float16 bits, or bfloat16: of the block, or of its only group
  uint16_t minimum;    // the same; a value is scale * code - minimum
  uint32_t word;       // for zeroed and single scales, and the factor of float8 scales
  uint8_t scales[16];  // of the groups; see ScaleKind
  uint8_t minima[16];
};

// Fills the fields that the type has and leaves the others.
template <Type type>
void read_block(const uint8_t* source, Block& block);

// The values of one block, in the defining order of operations: (block scale * group scale) * code.
template <Type type>
void block_values(const Block& block, float* out);

// Converts `cols` columns of one row of any type from the file's format. It is slow and plain; embeddings and
// references use it.
using DequantizeRow = void (*)(const uint8_t* source, int64_t cols, float* out);
DequantizeRow dequantize_row_of(Type type);  // null for an unknown type

}  // namespace ckdist
