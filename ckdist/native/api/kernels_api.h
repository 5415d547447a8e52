#pragma once
#include "api/export.h"

/* Packed matrix products, one call each. `isa`: name of a level (core_api.h), or null for the level chosen at load.
   `type`: GGUF's number of a weight type. Matrices are (rows, cols), activations (tokens, cols), both row-major. */

/* Bytes of one tile of 16 rows. A matrix has (rows + 15) / 16 tiles. */
CKDIST_EXPORT int64_t ckdist_tile_bytes(const char* isa, int32_t type, int64_t cols);
/* Packs rows of the file's format into tiles. ckdist_unpack: tiles to float32 (rows, cols). */
CKDIST_EXPORT int ckdist_pack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* source,
                              int64_t source_bytes, uint8_t* tiles, int64_t tiles_bytes);
CKDIST_EXPORT int ckdist_unpack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                                int64_t tiles_bytes, float* out);

/* The activation format of the type's product: 0 float32, 1 bfloat16, 2 int8 with a scale per 32 columns. The table has
   all levels of all architectures: this CPU and this build may lack the level. */
CKDIST_EXPORT int ckdist_activation_format(const char* isa, int32_t type);
/* The same for rows of prompts. It differs if the level has other products for them. */
CKDIST_EXPORT int ckdist_prompt_format(const char* isa, int32_t type);
CKDIST_EXPORT int64_t ckdist_activation_bytes(int32_t format, int64_t cols);
/* x: float32 (tokens, n), columns [lead, lead + n) of cols. out: (tokens, ckdist_activation_bytes). */
CKDIST_EXPORT int ckdist_prepare(const char* isa, int32_t format, const float* x, int64_t tokens, int64_t n,
                                 int64_t lead, int64_t cols, uint8_t* out, int64_t out_bytes);

/* y (tokens, rows) = x . matrix^T for the rows of tiles [tile_begin, tile_end); other columns of y do not change. x:
   output of ckdist_prepare. */
CKDIST_EXPORT int ckdist_multiply(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                                  int64_t tiles_bytes, int64_t tile_begin, int64_t tile_end, const uint8_t* x,
                                  int64_t x_bytes, int64_t tokens, float* y);

/* float32 (rows, cols) to the file's block format (F16, BF16, Q8_0, Q4_K), and back (every type). */
CKDIST_EXPORT int ckdist_quantize(const char* isa, int32_t type, int64_t rows, int64_t cols, const float* x,
                                  uint8_t* out, int64_t out_bytes);
CKDIST_EXPORT int ckdist_dequantize(int32_t type, int64_t rows, int64_t cols, const uint8_t* source,
                                    int64_t source_bytes, float* out);
