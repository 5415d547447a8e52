#ifndef CKDIST_API_KERNELS_H
#define CKDIST_API_KERNELS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Packed matrix products, one call at a time. `isa` is the name of a level (core.h), or null for the one chosen at
   load; `type` is a weight type as GGUF numbers it. Matrices are (rows, cols), activations (tokens, cols), both row by
   row. */

/* Bytes of one tile of 16 rows; a matrix of `rows` rows has (rows + 15) / 16 of them. */
CKDIST_EXPORT int64_t ckdist_tile_bytes(const char* isa, int32_t type, int64_t cols);
/* Rows in the file's own format into tiles, and tiles into float32 (rows, cols). */
CKDIST_EXPORT int ckdist_pack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* source,
                              int64_t source_bytes, uint8_t* tiles, int64_t tiles_bytes);
CKDIST_EXPORT int ckdist_unpack(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                                int64_t tiles_bytes, float* out);

/* The format of the activations of the type's product: 0 float32, 1 bfloat16, 2 int8 with a scale per 32 columns. It
   comes from a table of all levels of all architectures: this CPU and this build may lack the level. */
CKDIST_EXPORT int ckdist_activation_format(const char* isa, int32_t type);
CKDIST_EXPORT int64_t ckdist_activation_bytes(int32_t format, int64_t cols);
/* x: float32 (tokens, n), that stand at columns [lead, lead + n) of cols; out: tokens rows of ckdist_activation_bytes.
 */
CKDIST_EXPORT int ckdist_prepare(const char* isa, int32_t format, const float* x, int64_t tokens, int64_t n,
                                 int64_t lead, int64_t cols, uint8_t* out, int64_t out_bytes);

/* y (tokens, rows) = x . matrix^T for the rows of tiles [tile_begin, tile_end); other rows of y stay. x as
 * ckdist_prepare left it. */
CKDIST_EXPORT int ckdist_multiply(const char* isa, int32_t type, int64_t rows, int64_t cols, const uint8_t* tiles,
                                  int64_t tiles_bytes, int64_t tile_begin, int64_t tile_end, const uint8_t* x,
                                  int64_t x_bytes, int64_t tokens, float* y);

/* float32 (rows, cols) into the file's block format (F16, BF16, Q8_0, Q4_K), and back (every type). */
CKDIST_EXPORT int ckdist_quantize(const char* isa, int32_t type, int64_t rows, int64_t cols, const float* x,
                                  uint8_t* out, int64_t out_bytes);
CKDIST_EXPORT int ckdist_dequantize(int32_t type, int64_t rows, int64_t cols, const uint8_t* source,
                                    int64_t source_bytes, float* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
