#pragma once
#include "api/export.h"

/* The view of a communicator for inference steps (native/comm/step_communicator.h). An executable creates its own.
   The calls below are for ranks without an executable. `step` is named in errors. */
struct ckdist_communicator;
struct ckdist_steps;

/* A collective call. Partial values have at most `partial_floats`. Logits are (logit_rows, vocab); this rank has
   `columns` columns from `first_column` on. Batches have at most `batch_ints`. The communicator must outlive the
   steps. */
CKDIST_EXPORT int ckdist_steps_new(struct ckdist_communicator* communicator, int64_t partial_floats, int64_t logit_rows,
                                   int64_t vocab, int64_t first_column, int64_t columns, int64_t batch_ints,
                                   struct ckdist_steps** out);
CKDIST_EXPORT void ckdist_steps_free(struct ckdist_steps* steps);
/* Sends rank 0's batch to every other rank, which may read it until it receives the next. A batch of 0 ints is the
   last. */
CKDIST_EXPORT int ckdist_steps_publish(struct ckdist_steps* steps, const int32_t* batch, int64_t ints);
CKDIST_EXPORT int ckdist_steps_receive(struct ckdist_steps* steps, const int32_t** batch, int64_t* ints);
/* Buffer for this rank's part of the value in slot 0 or 1; slots alternate. */
CKDIST_EXPORT float* ckdist_steps_partial(struct ckdist_steps* steps, int32_t slot);
/* `chunks`: number of parts in which the sum is begun before it is waited for. */
CKDIST_EXPORT int ckdist_steps_all_reduce(struct ckdist_steps* steps, int32_t slot, int64_t floats, int32_t chunks,
                                          int32_t step);
/* The summands of the value in `slot`, in order, into `summands`, which has room for one of each rank; returns their
 * number. */
CKDIST_EXPORT int ckdist_steps_summands(struct ckdist_steps* steps, int32_t slot, const float** summands);
/* This rank's columns of row 0 of the logits. `stride` is in floats. */
CKDIST_EXPORT float* ckdist_steps_logits(struct ckdist_steps* steps, int64_t* stride);
CKDIST_EXPORT int ckdist_steps_gather_logits(struct ckdist_steps* steps, int64_t rows, int32_t step);
CKDIST_EXPORT const float* ckdist_steps_gathered(struct ckdist_steps* steps);
/* Messages of exactly `bytes` between two ranks. */
CKDIST_EXPORT int ckdist_steps_send(struct ckdist_steps* steps, int32_t peer, const void* data, int64_t bytes,
                                    int32_t step);
CKDIST_EXPORT int ckdist_steps_recv(struct ckdist_steps* steps, int32_t peer, void* data, int64_t bytes, int32_t step);
