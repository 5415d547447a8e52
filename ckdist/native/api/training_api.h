#pragma once
#include "api/communicator_api.h"
#include "api/export.h"
#include "api/pool_api.h"
#include "api/program_api.h"
#include "api/trace_api.h"

/* If ranks divide a batch, it consists of 2 N chunks of equal length for N ranks. Rank r has the chunks r and
   2 N - 1 - r, and all arrays but `starts` are of its own tokens. */
struct ckdist_training_batch {
  const int32_t* token_ids;
  const int32_t* targets;
  const int32_t* starts; /* (sequences + 1,), in the whole batch */
  int64_t tokens, sequences;
  const float* weights; /* (tokens,): factor of each token's loss and gradient; null: 1 */
  float* token_losses;  /* (tokens,): receives the losses without weights, 0 without a target; may be null */
  /* A teacher's most probable tokens at each target, ids ascending, and their log-probabilities: (tokens, choices).
     Null without a teacher. */
  const int32_t* teacher_ids;
  const float* teacher_logprobs;
  int64_t choices;
  int32_t* best_tokens; /* (tokens,): receives the token with the largest logit, -1 without a target; may be null */
  const uint32_t* keys; /* (tokens,): keys of the masks of dropout; null: nothing is dropped */
};

/* One pass over a batch. list: of the program's plan. kept: offset of the batch's values in kept memory. clear:
   gradients start from zero. reduce: gradients are summed over the replicas. */
struct ckdist_training_pass {
  int32_t list, clear, reduce;
  int64_t kept;
};

struct ckdist_training;
/* data: the ranks over which gradients are summed. tensor: the ranks that share the tensors. stages: one rank of
   each stage. sequence: the ranks that divide the tokens of each batch. Each may be null. The program's arrays must
   outlive the object. */
CKDIST_EXPORT int ckdist_training_new(const struct ckdist_program* program, struct ckdist_communicator* data,
                                      struct ckdist_communicator* tensor, struct ckdist_communicator* stages,
                                      struct ckdist_communicator* sequence, struct ckdist_pool* pool,
                                      struct ckdist_training** out);
CKDIST_EXPORT void ckdist_training_free(struct ckdist_training* training);
/* losses: (2,) sum of the losses, and load-balancing loss * number of targets (0 if the list has no such step). */
CKDIST_EXPORT int ckdist_training_run(struct ckdist_training* training, const struct ckdist_training_batch* batch,
                                      const struct ckdist_training_pass* pass, double* losses);
/* Returns when other stages have received all that was sent. */
CKDIST_EXPORT int ckdist_training_flush(struct ckdist_training* training);
/* Seconds of the first thread in the last run, by kind of step; the last element is packing. (ckdist_step_kinds +
   1,) */
CKDIST_EXPORT void ckdist_training_times(struct ckdist_training* training, double* out);
/* Makes every thread record its steps in a lane of its own. Not during a run. The trace must outlive the object. */
CKDIST_EXPORT int ckdist_training_trace(struct ckdist_training* training, struct ckdist_trace* trace);
/* Bytes of activations (including kept ones), of workspace, and of matrices that are packed once. (3,) */
CKDIST_EXPORT void ckdist_training_bytes(struct ckdist_training* training, int64_t* out);
