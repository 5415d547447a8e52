#ifndef CKDIST_API_RUNTIME_H
#define CKDIST_API_RUNTIME_H
#include <stdint.h>
#include "api/group.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A lowered program: steps over values, as the lowering in Python makes them. */

enum {
  ckdist_step_embed = 0,    /* out[0] = rows of matrix[0]; i[0]: first vocabulary row held, f[0]: scale */
  ckdist_step_prepare = 1,  /* s = sum(y); if vector[0] >= 0: s = rms_norm(s, vector[0]); r = x < 0 ? s : x + s; out[0] = r unless < 0;
                          if vector[1] >= 0: r = rms_norm(r, vector[1]); out[1 + format] = activations of r unless < 0; f[0]: eps */
  ckdist_step_linear = 2,   /* out[m] = in[m] (activations) times matrix[m] (+ vector[m]); i[0]: 1 when out[0] = gated(out[0], out[1]),
                          i[1]: the gate function, i[2]: 1 when a low_rank step follows, which adds to out; f[1]: soft cap on logits */
  ckdist_step_attend = 3,   /* rotates out[0] (q) and out[1] (k), stores k and out[2] (v), out[3] = attention; i[0]: layer,
                          i[1]: rope table, i[2]: window, i[3]: table of kv-heads in `ints`; vector[0], vector[1]: q and k norms;
                          f[0]: eps, f[1]: scale, f[2]: soft cap */
  ckdist_step_low_rank = 4  /* out[m] += matrix[m] times in[0] (activations), of which those with a matrix read one stretch of columns after
                          the other; i[0], i[1]: as in linear */
};
enum { ckdist_in_arena = 0, ckdist_in_slot = 1, ckdist_in_logits = 2, ckdist_in_activations = 3 };

struct ckdist_value {
  int32_t kind;
  int32_t format;   /* of activations */
  int64_t width;    /* floats in a row; activations: columns of the matrices that read them */
  int64_t place;    /* arena: byte offset; slot: its index; logits: first column */
  int64_t lead;     /* activations: columns before the row's own */
};

struct ckdist_step {
  int32_t op;
  int32_t outputs_only;  /* rows are the batch's output tokens instead of all its tokens */
  int32_t x, y;
  int32_t in[4], out[4], matrix[4], vector[4];
  int32_t i[4];
  float f[4];
};

struct ckdist_program {
  const struct ckdist_step* steps;
  int32_t step_count;
  const struct ckdist_value* values;
  int32_t value_count;
  const void* const* matrices;      /* struct ckdist_matrix of the loader */
  int32_t matrix_count;
  const float* const* vectors;
  int32_t vector_count;
  int64_t arena_bytes;
  int64_t max_tokens, max_sequences, max_outputs, context_length;
  int64_t vocab;                    /* of all ranks */
  int64_t partial_floats;           /* of one partial value */
  /* attention */
  int32_t kv_type, layers, head_dim, heads, kv_heads;   /* of this rank */
  const int32_t* heads_per_kv;      /* (kv_heads,) query heads that share each local kv-head */
  int64_t blocks;
  const float* rope_cos[2];         /* (context_length, head_dim / 2); [1] null where there is one table */
  const float* rope_sin[2];
};

struct ckdist_executable;

/* `cpus`: one per thread or null; `spins`: polls before a waiting thread sleeps. The program's arrays must outlive the executable. */
CKDIST_EXPORT int ckdist_executable_new(const struct ckdist_program* program, struct ckdist_group* group, int32_t threads, const int32_t* cpus,
                                        int32_t spins, struct ckdist_executable** out);
CKDIST_EXPORT void ckdist_executable_free(struct ckdist_executable* executable);

/* Runs one batch on all ranks; called on rank 0. `threads` to use, at most those of the executable.
   message: tokens, runs, blocks, outputs, threads, then the arrays of Batch in their order, int32. */
CKDIST_EXPORT int ckdist_executable_run(struct ckdist_executable* executable, const int32_t* message, int64_t ints);
/* The other ranks: runs every batch that rank 0 publishes until it asks to stop. */
CKDIST_EXPORT int ckdist_executable_work(struct ckdist_executable* executable);
/* Rank 0: lets the others return from ckdist_executable_work. */
CKDIST_EXPORT int ckdist_executable_stop(struct ckdist_executable* executable);
CKDIST_EXPORT const float* ckdist_executable_logits(struct ckdist_executable* executable);
CKDIST_EXPORT int64_t ckdist_executable_kv_bytes(struct ckdist_executable* executable);
CKDIST_EXPORT const void* ckdist_executable_kv(struct ckdist_executable* executable);

/* Seconds of thread 0 since the last reset: in steps, waiting at barriers inside the rank, and in exchanges with other ranks. */
struct ckdist_times { double total, barrier, exchange; int64_t runs; };
CKDIST_EXPORT void ckdist_executable_times(struct ckdist_executable* executable, struct ckdist_times* out, int32_t reset);

/* Bytes of one block of `kv_type` for one kv-head of one layer. */
CKDIST_EXPORT int64_t ckdist_kv_block_bytes(int32_t kv_type, int32_t head_dim);

#ifdef __cplusplus
} // extern "C"
#endif
#endif
