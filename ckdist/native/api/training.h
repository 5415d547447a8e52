#ifndef CKDIST_API_TRAINING_H
#define CKDIST_API_TRAINING_H
#include <stdint.h>
#include "api/attention.h"
#include "api/communicator.h"
#include "api/pool.h"
#include "api/steps.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A lowered training program: steps over values of (tokens, width) elements. Indices that are absent are -1. */

struct ckdist_training_parameter {
  int64_t offset, rows, cols; /* floats in the arenas of parameters and of gradients; rows is 1 of a vector */
  int64_t matrices;           /* of a stack, whose rows are those of all; else 1 */
  const void* matrix;         /* struct ckdist_matrix of one that is frozen as its file has it; null: it is in the arena
                               */
};
/* Matrices in the form of a product: one as it is, or several transposed and side by side, each padded to 16 columns.
 */
struct ckdist_training_pack {
  int32_t transposed, count;
  const int32_t* parameters;
};

/* Steps of one pass. cleared: parameters whose gradients no product overwrites: they begin with zeros. */
struct ckdist_training_list {
  const struct ckdist_step* const* steps;
  const int32_t* cleared;
  int32_t count, cleared_count;
};

struct ckdist_training_program {
  const struct ckdist_training_list* lists;
  int32_t list_count;
  const struct ckdist_value* values;
  int32_t value_count;
  const struct ckdist_training_parameter* parameters;
  int32_t parameter_count;
  const struct ckdist_training_pack* packs;
  int32_t pack_count;
  int64_t arena_bytes, kept_bytes; /* of values that live in one pass, and of those that are kept between two */
  int64_t max_tokens, vocab;
  int64_t trained_floats; /* of the parameters' arena: those that change, packed by each step that multiplies with them.
                             What lies behind them is packed once, where no trained matrix is packed beside it, and
                             then, but for vectors and the embeddings, not read again */
  int32_t bf16;           /* what products read is bfloat16, else float32 */
  struct ckdist_rope ropes[4]; /* of max_tokens positions */
  const float* parameter_arena;
  float* gradient_arena;
  float* const* outgoing; /* rows on their way to other stages; in each place those of one message */
  int32_t outgoing_count;
};

struct ckdist_training_batch {
  const int32_t* token_ids;
  const int32_t* targets;
  const int32_t* starts; /* (sequences + 1,) */
  int64_t tokens, sequences;
};

/* What is done with a batch. kept: where in what is kept values of the batch lie; clear: what the gradients held does
   not count; reduce: gradients are summed over the replicas. */
struct ckdist_training_pass {
  int32_t list, clear, reduce;
  int64_t kept;
};

struct ckdist_training;
/* data: of the replicas over which gradients are summed; tensor: of the ranks that share the tensors; stages: one rank
 * of each; or null. What the program names must outlive it. */
CKDIST_EXPORT int ckdist_training_new(const struct ckdist_training_program* program, struct ckdist_communicator* data,
                                      struct ckdist_communicator* tensor, struct ckdist_communicator* stages,
                                      struct ckdist_pool* pool, struct ckdist_training** out);
CKDIST_EXPORT void ckdist_training_free(struct ckdist_training* training);
/* losses: their sum and the load-balancing loss times the targets, 0 where the list has no step of it, (2,). */
CKDIST_EXPORT int ckdist_training_run(struct ckdist_training* training, const struct ckdist_training_batch* batch,
                                      const struct ckdist_training_pass* pass, double* losses);
/* Returns when other stages have all that was sent. */
CKDIST_EXPORT int ckdist_training_flush(struct ckdist_training* training);
/* Seconds of the last run by kind of step, and in the last place those of packing; of the first thread.
   (ckdist_step_kinds + 1,) */
CKDIST_EXPORT void ckdist_training_times(struct ckdist_training* training, double* out);
/* Bytes of activations, kept ones among them, of workspace, and of matrices that are packed for good. (3,) */
CKDIST_EXPORT void ckdist_training_bytes(struct ckdist_training* training, int64_t* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
