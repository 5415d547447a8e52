#ifndef CKDIST_API_ATTENTION_H
#define CKDIST_API_ATTENTION_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The attention kernels, one call each, as kernels/attention.h describes them. `isa` names the table; null: the one
   chosen at load. kv_type is a weight type's number: 0 f32, 1 f16, 8 q8_0, 25 i16, 30 bf16. head_dim is a multiple
   of 8. */
CKDIST_EXPORT int64_t ckdist_attention_block_bytes(const char* isa, int32_t kv_type, int32_t head_dim);
CKDIST_EXPORT int32_t ckdist_attention_store(const char* isa, int32_t kv_type, uint8_t* block, int32_t slot,
                                             int32_t head_dim, const float* k, const float* v);

struct ckdist_attention_task {
  int32_t kv_type, head_dim;
  const uint8_t* kv;
  int64_t block_stride; /* bytes */
  const int32_t* block_table;
  int64_t first_position;
  int32_t tokens, heads;
  const float* q;                        /* (tokens, heads, head_dim) */
  int64_t q_token_stride, q_head_stride; /* floats */
  float* out;
  int64_t out_token_stride, out_head_stride;
  float scale, soft_cap; /* soft_cap 0: none */
  int64_t window;        /* 0: all */
};

/* scratch: ckdist_attention_scratch_bytes() of them, 64-byte aligned. */
CKDIST_EXPORT int64_t ckdist_attention_scratch_bytes(const char* isa, int32_t tokens, int32_t heads, int32_t head_dim);
CKDIST_EXPORT int32_t ckdist_attend(const char* isa, const struct ckdist_attention_task* task, uint8_t* scratch);
/* The same as threads share it: `spans` of 256 positions at a time into parts, which are then merged. */
CKDIST_EXPORT int32_t ckdist_attend_in_parts(const char* isa, const struct ckdist_attention_task* task, int64_t spans,
                                             uint8_t* scratch);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
