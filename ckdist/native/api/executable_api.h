#ifndef CKDIST_API_EXECUTABLE_H
#define CKDIST_API_EXECUTABLE_H
#include <stdint.h>
#include "api/attention_api.h"
#include "api/commands_api.h"
#include "api/communicator_api.h"
#include "api/loader_api.h"
#include "api/pool_api.h"
#include "api/steps_api.h"
#include "api/trace_api.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Sharding of a rank's tokens over hosts between the products that need all tokens (comm/row_exchange.h). own: the
   ranks of a host have different tokens. ckdist_host_rows_alike: they have the same tokens. */
enum ckdist_host_rows { ckdist_host_rows_none, ckdist_host_rows_own, ckdist_host_rows_alike };

/* One of the programs that use the same cache, lowered for this rank. */
struct ckdist_execution_plan {
  const struct ckdist_step* const* steps;
  int32_t step_count;
  const struct ckdist_value* values;
  int32_t value_count;
  const void* const* matrices; /* struct ckdist_matrix of the loader */
  int32_t matrix_count;
  const float* const* vectors;
  int32_t vector_count;
  /* Each rank of a host has the tokens [ceil(tokens * rank / size), ceil(tokens * (rank + 1) / size)) of a batch,
     where rank and size count the host's ranks. */
  int32_t tokens_sharded;
  enum ckdist_host_rows host_rows;
};

/* Attention of one layer on this rank, and its cache per token. */
struct ckdist_layer_attention {
  struct ckdist_cache_shape cache;
  int32_t kv_heads;
  const int32_t* heads_per_kv; /* (kv_heads,) query heads that share each local kv-head */
  /* over all ranks, for sums over all heads */
  int32_t total_heads, total_kv_heads, first_head;
  /* (total_kv_heads,): if tokens are sharded, the position of each kv-head in a token's row */
  const int32_t* key_places;
};

/* Linear attention of one layer on this rank: its state per sequence. No value heads: the layer has no state. */
struct ckdist_layer_state {
  int32_t value_heads, key_width, value_width;
  int32_t taps;               /* tokens of the short convolutions */
  const int32_t* key_head_of; /* (value_heads,) local key head of each value head */
};

struct ckdist_program {
  const struct ckdist_execution_plan* plans; /* at most 8 */
  int32_t plan_count;
  int64_t arena_bytes; /* of the largest plan */
  int64_t max_tokens, max_sequences, max_outputs, context_length;
  int64_t vocab;           /* over all ranks */
  int64_t hidden;          /* floats of a row of hidden states; 0: no plan returns them */
  int64_t exchange_floats; /* floats of one value that other ranks read, the same on every rank */
  /* attention */
  int32_t layers;
  const struct ckdist_layer_attention* attention; /* (layers,); layers without heads have no attention */
  const struct ckdist_layer_state* states;        /* (layers,) */
  int32_t experts;                                /* maximum experts of a layer; 0: no layer has experts */
  int64_t state_slots; /* slots, each for all layers' states of one sequence; 0: no layer has a state */
  int64_t blocks;
  struct ckdist_rope ropes[4];
  struct ckdist_loader* loader; /* packs matrices that are not packed yet; null: all are packed */
  /* Pipeline stages. For one stage: 0, -1, -1. */
  int32_t in_flight;      /* maximum batches that are published before the first of them has run on rank 0 */
  int32_t previous, next; /* ranks of the job in the neighbouring stages; -1: none */
  float* const* outgoing; /* (in_flight,) buffers of rows on their way to `next` */
};

struct ckdist_executable;

/* The program's arrays must outlive the executable. `job`: all ranks. `stage`: the ranks of this rank's stage; `job`
   itself if there is one stage. */
CKDIST_EXPORT int ckdist_executable_new(const struct ckdist_program* program, struct ckdist_communicator* job,
                                        struct ckdist_communicator* stage, struct ckdist_pool* pool,
                                        struct ckdist_executable** out);
CKDIST_EXPORT void ckdist_executable_free(struct ckdist_executable* executable);

/* Allocates room for `blocks` blocks outside the cache (ckdist_command_copy_blocks). Once, before the first copy. */
CKDIST_EXPORT int ckdist_executable_make_store(struct ckdist_executable* executable, int64_t blocks);
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
  ckdist_cache_q8_0 = 8,
  ckdist_cache_i16 = 25,
  ckdist_cache_bf16 = 30
};
#ifdef __cplusplus
}  // extern "C"
#endif
#endif
