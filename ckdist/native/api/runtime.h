#ifndef CKDIST_API_RUNTIME_H
#define CKDIST_API_RUNTIME_H
#include <stdint.h>
#include "api/attention.h"
#include "api/communicator.h"
#include "api/loader.h"
#include "api/trace.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Lowered programs: steps over values, as the lowering in Python makes them. Where tokens are cut, every rank of a host
   has its own share [ceil(tokens * rank / size), ceil(tokens * (rank + 1) / size)) of a batch's tokens, counted among
   the host's ranks, and `count` says how many ranks' shards, which stand one after another, a matrix is made of. */

enum {
  ckdist_step_embed =
      0, /* out[0] = rows of matrix[0], of count[0] shards; i[0]: first vocabulary row held, f[0]: scale */
  ckdist_step_prepare = 1, /* s = sum(y); if vector[0] >= 0: s = rms_norm(s, vector[0]); s = f[1] s; r = x < 0 ? s : x +
                         s; out[0] = r unless < 0; if vector[1] >= 0: r = rms_norm(r, vector[1]); r = f[2] r; out[1 +
                         format] = activations of r unless < 0, count[0] values of which each takes the next floats of
                         r; f[0]: eps; f[1], f[2]: 0 is 1 */
  ckdist_step_linear = 2,  /* out[m] = in[m] (activations) times matrix[m] (+ vector[m]); i[0]: 1 when out[0] =
                         gated(out[0], out[1]), i[1]: the gate function; f[1]: soft cap on logits; of count[m] shards
                         (and their vectors) side by side, or where i[2]: out[0] = the sum of in[0] + s times shard s,
                         with vector[0] on the first; i[3]: 1 when a low_rank step follows, which adds to out */
  ckdist_step_attend = 3,  /* rotates out[0] (q) and out[1] (k), stores k and out[2] (v), out[3] = attention; i[0]:
                         layer, i[1]: rope table, -1: nothing is rotated, i[2]: window; vector[0], vector[1]: q and k
                         norms, of one head, or where y >= 0 of all local heads, y being the sums of squares of all
                         heads; x: where rotated queries go unless they stay; f[0]: eps, f[1]: scale, f[2]: soft cap */
  ckdist_step_share = 4, /* out[0] (slot), row i = r of `prepare` of the i-th output's token, by the rank that has it */
  ckdist_step_squares = 6, /* out[0] = the sums of squares of each head of x (queries) and then of y (keys), 0 of heads
                         that are not local or that another rank counts; i[0]: layer */
  ckdist_step_low_rank = 5 /* out[m] += matrix[m] times in[0] (activations), of which those with a matrix read one
                         stretch of columns after the other; i[0], i[1]: as in linear; only where tokens are not cut */
};
enum {
  ckdist_in_arena = 0,
  ckdist_in_slot = 1,
  ckdist_in_logits = 2,
  ckdist_in_activations = 3,
  ckdist_in_tokens = 4,  /* all tokens' rows, each in the slot of the rank that has the token */
  ckdist_in_columns = 5, /* own tokens' rows, of which each rank's columns are in its slot */
  ckdist_in_outputs = 6, /* all outputs' rows, each in the slot of the rank that has its token */
  ckdist_in_sums = 7     /* partial over hosts: all tokens' rows, of which each rank of a host writes its own */
};

struct ckdist_value {
  int32_t kind;
  int32_t format; /* of activations */
  int64_t width;  /* floats from row to row; activations: columns of the matrices that read them */
  int64_t place;  /* arena: byte offset; slot and what is read there: its index; logits: first column */
  int64_t lead;   /* columns before the value's own */
  int64_t floats; /* activations: columns of their own */
  int32_t taken;  /* rows are outputs instead of tokens; else a step of outputs finds them at their tokens */
};

struct ckdist_step {
  int32_t op;
  int32_t outputs_only; /* rows are the batch's output tokens instead of all its tokens */
  int32_t own;          /* those that are among the rank's own tokens */
  int32_t x, y;
  int32_t in[4], out[4], matrix[4], vector[4], count[4];
  int32_t i[4];
  float f[4];
};

/* One of the programs that run on the same cache. */
struct ckdist_phase {
  const struct ckdist_step* steps;
  int32_t step_count;
  const struct ckdist_value* values;
  int32_t value_count;
  const void* const* matrices; /* struct ckdist_matrix of the loader */
  int32_t matrix_count;
  const float* const* vectors;
  int32_t vector_count;
  int32_t tokens_cut; /* over the ranks of each host */
};

/* Attention of one layer on this rank, and what of its tokens it caches. */
struct ckdist_layer_attention {
  struct ckdist_cache_shape cache;
  int32_t kv_heads;
  const int32_t* heads_per_kv; /* (kv_heads,) query heads that share each local kv-head */
  /* of all ranks, for sums over all heads */
  int32_t total_heads, total_kv_heads, first_head;
  const int32_t* key_places; /* (total_kv_heads,) where tokens are cut: which head of a token's row each kv-head is */
};

struct ckdist_program {
  const struct ckdist_phase* phases; /* at most 8 */
  int32_t phase_count;
  int64_t arena_bytes; /* of the largest phase */
  int64_t max_tokens, max_sequences, max_outputs, context_length;
  int64_t vocab;           /* of all ranks */
  int64_t exchange_floats; /* of one value that other ranks read, the same on every rank */
  /* attention */
  int32_t layers;
  const struct ckdist_layer_attention* attention; /* (layers,) */
  int64_t blocks;
  struct ckdist_rope ropes[4];
  struct ckdist_loader* loader; /* of matrices that are not all packed, filling; null: all are */
};

struct ckdist_executable;

/* `cpus`: one per thread or null; `spins`: polls before a waiting thread sleeps. The program's arrays must outlive the
 * executable. */
CKDIST_EXPORT int ckdist_executable_new(const struct ckdist_program* program, struct ckdist_communicator* communicator,
                                        int32_t threads, const int32_t* cpus, int32_t spins,
                                        struct ckdist_executable** out);
CKDIST_EXPORT void ckdist_executable_free(struct ckdist_executable* executable);

/* Runs one batch on all ranks; called on rank 0. `threads` to use, at most those of the executable.
   message: tokens, runs, blocks, outputs, threads, phase, steps to walk (0: all), then the arrays of Batch in their
   order, int32. */
CKDIST_EXPORT int ckdist_executable_run(struct ckdist_executable* executable, const int32_t* message, int64_t ints);
/* The other ranks: runs every batch that rank 0 publishes until it asks to stop. */
CKDIST_EXPORT int ckdist_executable_work(struct ckdist_executable* executable);
/* Rank 0: lets the others return from ckdist_executable_work. */
CKDIST_EXPORT int ckdist_executable_stop(struct ckdist_executable* executable);
CKDIST_EXPORT const float* ckdist_executable_logits(struct ckdist_executable* executable);
CKDIST_EXPORT int64_t ckdist_executable_kv_bytes(struct ckdist_executable* executable);
CKDIST_EXPORT const void* ckdist_executable_kv(struct ckdist_executable* executable);

/* Seconds of thread 0 since the last reset: in steps, waiting at barriers inside the rank, and in exchanges with other
   ranks. moved: bytes that this rank's threads read of other ranks' memory, between the layers' parts. */
struct ckdist_times {
  double total, barrier, exchange;
  int64_t runs, moved;
};
CKDIST_EXPORT void ckdist_executable_times(struct ckdist_executable* executable, struct ckdist_times* out,
                                           int32_t reset);

/* From now on every thread writes what it does to a lane of its own ("thread 0"). Not while a batch runs; the trace
 * outlives the executable. */
CKDIST_EXPORT int ckdist_executable_trace(struct ckdist_executable* executable, struct ckdist_trace* trace);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
