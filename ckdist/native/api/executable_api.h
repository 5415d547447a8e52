#pragma once
#include "api/commands_api.h"
#include "api/communicator_api.h"
#include "api/export.h"
#include "api/pool_api.h"
#include "api/program_api.h"
#include "api/trace_api.h"

struct ckdist_executable;

/* The program's arrays must outlive the executable. `job`: all ranks. `stage`: the ranks of this rank's stage; `job`
   itself if there is one stage. */
CKDIST_EXPORT int ckdist_executable_new(const struct ckdist_program* program, struct ckdist_communicator* job,
                                        struct ckdist_communicator* stage, struct ckdist_pool* pool,
                                        struct ckdist_executable** out);
CKDIST_EXPORT void ckdist_executable_free(struct ckdist_executable* executable);

/* Bytes of a slot of a slab, without its header; 0 if the cache has nothing of the kind. */
CKDIST_EXPORT int64_t ckdist_executable_slab_bytes(const struct ckdist_executable* executable,
                                                   enum ckdist_slab_kind kind);
/* Gives the rank a slab of `slots` slots (ckdist_command_copy_blocks), once per kind and before the first copy. Its
   files must stay open as long as copies run. */
CKDIST_EXPORT int ckdist_executable_set_slab(struct ckdist_executable* executable, enum ckdist_slab_kind kind,
                                             int32_t headers_file, int32_t data_file, int64_t slots);
CKDIST_EXPORT const float* ckdist_executable_logits(struct ckdist_executable* executable);
/* (max_outputs, hidden): the rows of the last batch of a plan that returns hidden states. */
CKDIST_EXPORT const float* ckdist_executable_hidden(struct ckdist_executable* executable);
CKDIST_EXPORT int64_t ckdist_executable_kv_bytes(struct ckdist_executable* executable);
CKDIST_EXPORT const void* ckdist_executable_kv(struct ckdist_executable* executable);

/* Statistics since the last reset.
   total, barrier, exchange: seconds of thread 0 in steps, at barriers inside the rank, and in exchanges with other
   ranks.
   moved: bytes of other ranks' memory that this rank's threads read between the parts of layers.
   sent: bytes sent to other hosts.
   decode, decode_runs, decode_read: for steps without prompts, their seconds, their number, and the bytes of weights
   and cache that they read.
   packed: packed bytes of this rank's weights; -1 if all were packed at the start. */
struct ckdist_step_stats {
  double total, barrier, exchange, decode;
  int64_t runs, moved, sent, decode_runs, decode_read, packed;
};
CKDIST_EXPORT void ckdist_executable_stats(struct ckdist_executable* executable, struct ckdist_step_stats* out,
                                           int32_t reset);
/* (layers, experts): rows of each expert so far, over all tokens that this rank's host computed. Not during a batch. */
CKDIST_EXPORT void ckdist_executable_expert_rows(const struct ckdist_executable* executable, int64_t* out);

/* Makes every thread record its steps in a lane of its own ("thread 0"). Not during a batch. The trace must outlive
   the executable. */
CKDIST_EXPORT int ckdist_executable_trace(struct ckdist_executable* executable, struct ckdist_trace* trace);

enum ckdist_cache_type {
  ckdist_cache_f32 = 0,
  ckdist_cache_f16 = 1,
  ckdist_cache_q4_0 = 2,
  ckdist_cache_q8_0 = 8,
  ckdist_cache_i16 = 25,
  ckdist_cache_bf16 = 30
};
