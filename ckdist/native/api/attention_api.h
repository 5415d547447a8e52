#pragma once
#include "api/export.h"

/* The attention kernels, one call each; see kernels/attention.h. `isa` selects the kernel table; null: the table
   chosen at load. */

/* The cache of one token and kv-head. Types are numbers of weight types: 0 f32, 1 f16, 2 q4_0, 8 q8_0, 25 i16, 30
   bf16. Widths are multiples of 8. */
struct ckdist_cache_shape {
  int32_t key_type, value_type, key_width, value_width;
  int32_t latent; /* values are not stored: they are the first elements of the keys, with the keys' type */
};
CKDIST_EXPORT int64_t ckdist_attention_block_bytes(const char* isa, const struct ckdist_cache_shape* cache);
CKDIST_EXPORT int32_t ckdist_attention_store(const char* isa, const struct ckdist_cache_shape* cache, uint8_t* block,
                                             int32_t slot, const float* k, const float* v);
/* The same for all sixteen positions of a block. k: (16, key_width), v: (16, value_width), or null if latent. */
CKDIST_EXPORT int32_t ckdist_attention_store_block(const char* isa, const struct ckdist_cache_shape* cache,
                                                   uint8_t* block, const float* k, const float* v);

struct ckdist_attention_task {
  struct ckdist_cache_shape cache;
  const uint8_t* kv;
  int64_t block_stride; /* bytes */
  const int32_t* block_table;
  int64_t first_position;
  int32_t tokens, heads;
  const float* q;                        /* (tokens, heads, key_width) */
  int64_t q_token_stride, q_head_stride; /* floats */
  float* out;                            /* (tokens, heads, value_width) */
  int64_t out_token_stride, out_head_stride;
  float scale, soft_cap; /* soft_cap 0: none */
  int64_t window;        /* 0: all */
  int64_t context;       /* 0: causal; else every query sees this many tokens, limited by the window */
  const float* sinks;    /* (heads,): for each head a score without a value; null: none */
};

/* Cosines and sines, (positions, dims / 2). The first `dims` elements of a head are rotated. */
struct ckdist_rope {
  const float* cos;
  const float* sin;
  int32_t dims;
  int32_t interleaved; /* element 2 i is paired with 2 i + 1, else i with i + dims / 2 */
  const int32_t* axes; /* (dims / 2,): axis, 0 to 2, of the position that rotates a pair; null: positions have one */
};

/* scratch: ckdist_attention_scratch_bytes() bytes, 64-byte aligned. */
CKDIST_EXPORT int64_t ckdist_attention_scratch_bytes(const char* isa, const struct ckdist_cache_shape* cache,
                                                     int32_t tokens, int32_t heads);
CKDIST_EXPORT int32_t ckdist_attend(const char* isa, const struct ckdist_attention_task* task, uint8_t* scratch);
/* The same result by parts, as threads share it: `spans` spans of 256 positions at a time, which are then merged. */
CKDIST_EXPORT int32_t ckdist_attend_in_parts(const char* isa, const struct ckdist_attention_task* task, int64_t spans,
                                             uint8_t* scratch);
