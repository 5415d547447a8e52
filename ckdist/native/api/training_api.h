#ifndef CKDIST_API_TRAINING_H
#define CKDIST_API_TRAINING_H
#include <stdint.h>
#include "api/attention_api.h"
#include "api/communicator_api.h"
#include "api/pool_api.h"
#include "api/steps_api.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A lowered training program: steps over values of (tokens, width) elements. Absent indices are -1. */

struct ckdist_training_parameter {
  int64_t offset, rows, cols; /* offset in floats in the arenas of parameters and gradients; rows is 1 for a vector */
  int64_t matrices;           /* number of a stack's matrices, whose rows are counted together; else 1 */
  /* struct ckdist_matrix of a frozen parameter in its file's format; null: the parameter is in the arena. */
  const void* matrix;
};
/* Matrices packed for a product: one as it is, or several transposed and side by side, each padded to 16 columns. */
struct ckdist_training_pack {
  int32_t transposed, count;
  const int32_t* parameters;
};

/* Steps of one pass. cleared: parameters whose gradients start as zeros, because no product overwrites them. */
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
  int64_t arena_bytes, kept_bytes; /* of values of one pass, and of values that are kept between two passes */
  int64_t max_tokens, vocab;
  /* Floats of trained parameters at the beginning of the parameters' arena. Each step that multiplies by them packs
     them. The parameters after them are packed once, unless a trained matrix is in the same pack. Then only vectors
     and embeddings are read again. */
  int64_t trained_floats;
  int32_t bf16;                /* products read bfloat16, else float32 */
  struct ckdist_rope ropes[4]; /* of max_tokens positions */
  const float* parameter_arena;
  float* gradient_arena;
  float* const* outgoing; /* buffers of rows on their way to other stages, one for each message */
  int32_t outgoing_count;
};

struct ckdist_training_batch {
  const int32_t* token_ids;
  const int32_t* targets;
  const int32_t* starts; /* (sequences + 1,) */
  int64_t tokens, sequences;
};

/* One pass over a batch. kept: offset of the batch's values in kept memory. clear: gradients start from zero.
   reduce: gradients are summed over the replicas. */
struct ckdist_training_pass {
  int32_t list, clear, reduce;
  int64_t kept;
};

struct ckdist_training;
/* data: the replicas, over which gradients are summed. tensor: the ranks that share the tensors. stages: one rank of
   each stage. Each may be null. The program's arrays must outlive the object. */
CKDIST_EXPORT int ckdist_training_new(const struct ckdist_training_program* program, struct ckdist_communicator* data,
                                      struct ckdist_communicator* tensor, struct ckdist_communicator* stages,
                                      struct ckdist_pool* pool, struct ckdist_training** out);
CKDIST_EXPORT void ckdist_training_free(struct ckdist_training* training);
/* losses: (2,) sum of the losses, and load-balancing loss * number of targets (0 if the list has no such step). */
CKDIST_EXPORT int ckdist_training_run(struct ckdist_training* training, const struct ckdist_training_batch* batch,
                                      const struct ckdist_training_pass* pass, double* losses);
/* Returns when other stages have received all that was sent. */
CKDIST_EXPORT int ckdist_training_flush(struct ckdist_training* training);
/* Seconds of the first thread in the last run, by kind of step; the last element is packing. (ckdist_step_kinds +
   1,) */
CKDIST_EXPORT void ckdist_training_times(struct ckdist_training* training, double* out);
/* Bytes of activations (including kept ones), of workspace, and of matrices that are packed once. (3,) */
CKDIST_EXPORT void ckdist_training_bytes(struct ckdist_training* training, int64_t* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
