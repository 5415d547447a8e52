#ifndef CKDIST_API_EXECUTABLE_H
#define CKDIST_API_EXECUTABLE_H
#include <stdint.h>
#include "api/attention.h"
#include "api/communicator.h"
#include "api/loader.h"
#include "api/pool.h"
#include "api/steps.h"
#include "api/trace.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Whether hosts share a rank's tokens out between the products that need all of them (comm/row_exchange.h): not; where
   the ranks of a host have different tokens; where they have the same. */
enum ckdist_host_rows { ckdist_host_rows_none, ckdist_host_rows_own, ckdist_host_rows_alike };

/* One of the programs that run on the same cache, lowered for this rank. */
struct ckdist_execution_plan {
  const struct ckdist_step* const* steps;
  int32_t step_count;
  const struct ckdist_value* values;
  int32_t value_count;
  const void* const* matrices; /* struct ckdist_matrix of the loader */
  int32_t matrix_count;
  const float* const* vectors;
  int32_t vector_count;
  /* Every rank of a host has a range [ceil(tokens * rank / size), ceil(tokens * (rank + 1) / size)) of a batch's
     tokens, counted among the host's ranks. */
  int32_t tokens_sharded;
  int32_t host_rows; /* enum ckdist_host_rows */
};

/* Attention of one layer on this rank, and what of its tokens it caches. */
struct ckdist_layer_attention {
  struct ckdist_cache_shape cache;
  int32_t kv_heads;
  const int32_t* heads_per_kv; /* (kv_heads,) query heads that share each local kv-head */
  /* of all ranks, for sums over all heads */
  int32_t total_heads, total_kv_heads, first_head;
  const int32_t* key_places; /* (total_kv_heads,) where tokens are sharded: which head of a token's row each kv-head is
                              */
};

/* Linear attention of one layer on this rank: what it keeps of every sequence. No value heads: the layer keeps nothing.
 */
struct ckdist_layer_state {
  int32_t value_heads, key_width, value_width;
  int32_t taps;               /* tokens that the short convolutions see */
  const int32_t* key_head_of; /* (value_heads,) the local key head that each reads */
};

struct ckdist_program {
  const struct ckdist_execution_plan* plans; /* at most 8 */
  int32_t plan_count;
  int64_t arena_bytes; /* of the largest plan */
  int64_t max_tokens, max_sequences, max_outputs, context_length;
  int64_t vocab;           /* of all ranks */
  int64_t hidden;          /* floats of a row of hidden states; 0: no plan has them */
  int64_t exchange_floats; /* of one value that other ranks read, the same on every rank */
  /* attention */
  int32_t layers;
  const struct ckdist_layer_attention* attention; /* (layers,); no heads in all: the layer has none */
  const struct ckdist_layer_state* states;        /* (layers,) */
  int32_t experts;                                /* of a layer at most; 0: no layer has any */
  int64_t state_slots; /* that hold all layers' states of a sequence each; 0: no layer has any */
  int64_t blocks;
  struct ckdist_rope ropes[4];
  struct ckdist_loader* loader; /* of matrices that are not all packed, filling; null: all are */
  /* The stages of a job's ranks; one: 0, -1, -1. */
  int32_t in_flight;      /* batches that are published before the first of them has run on rank 0, at most */
  int32_t previous, next; /* ranks of the job that rows come from and go to; -1: none */
  float* const* outgoing; /* (in_flight,) places for rows on their way to `next` */
};

struct ckdist_executable;

struct ckdist_batch_header {
  /* the lengths of the arrays that follow; blocks: of all sequences; states, firsts: as many as sequences, or none */
  int32_t tokens, sequences, blocks, selected, states, firsts;
  int32_t threads;     /* to use, at most those of the pool */
  int32_t plan, steps; /* to walk, and how many of it; 0: all */
};
/* Consecutive tokens of one sequence. */
struct ckdist_sequence_chunk {
  int32_t tokens, first_position, blocks;
};
/* Where the state of a sequence's chunk begins and ends, by slots. Slots that a step writes are no other's in it. */
struct ckdist_state_slots {
  int32_t in;            /* of the tokens before the chunk; -1: there are none */
  int32_t out;           /* of all its tokens */
  int32_t save;          /* of the tokens before position `save_position`, a whole number of blocks; -1: none */
  int32_t save_position; /* above the first position, and at most the end */
};
enum { ckdist_block_tokens = 16 }; /* positions of one block of the cache */

/* The program's arrays must outlive the executable. */
/* `job`: of all ranks; `stage`: of those of this rank's stage, the same where there is one. */
CKDIST_EXPORT int ckdist_executable_new(const struct ckdist_program* program, struct ckdist_communicator* job,
                                        struct ckdist_communicator* stage, struct ckdist_pool* pool,
                                        struct ckdist_executable** out);
CKDIST_EXPORT void ckdist_executable_free(struct ckdist_executable* executable);

/* Rank 0: gives all ranks a batch. message: struct ckdist_batch_header, then the arrays of Batch in their order, int32;
   it stays as it is until the batch has run. */
CKDIST_EXPORT int ckdist_executable_publish(struct ckdist_executable* executable, const int32_t* message, int64_t ints);
/* Rank 0: runs its own part of the oldest batch that was published and has not run. */
CKDIST_EXPORT int ckdist_executable_run(struct ckdist_executable* executable);
/* The other ranks: runs every batch that rank 0 publishes until it asks to stop. */
CKDIST_EXPORT int ckdist_executable_work(struct ckdist_executable* executable);
/* Rank 0: lets the others return from ckdist_executable_work. */
CKDIST_EXPORT int ckdist_executable_stop(struct ckdist_executable* executable);
CKDIST_EXPORT const float* ckdist_executable_logits(struct ckdist_executable* executable);
/* (max_outputs, hidden): the rows of the last batch of a plan that makes hidden states. */
CKDIST_EXPORT const float* ckdist_executable_hidden(struct ckdist_executable* executable);
CKDIST_EXPORT int64_t ckdist_executable_kv_bytes(struct ckdist_executable* executable);
CKDIST_EXPORT const void* ckdist_executable_kv(struct ckdist_executable* executable);

/* Seconds of thread 0 since the last reset: in steps, waiting at barriers inside the rank, and in exchanges with other
   ranks. moved: bytes that this rank's threads read of other ranks' memory, between the layers' parts; sent: bytes that
   it sent to other hosts. Of steps without prompts: seconds, how many there were, and the bytes of weights and cache
   that they read. packed: bytes of this rank's weights that are packed; -1 where all are from the start. */
struct ckdist_step_stats {
  double total, barrier, exchange, decode;
  int64_t runs, moved, sent, decode_runs, decode_read, packed;
};
CKDIST_EXPORT void ckdist_executable_stats(struct ckdist_executable* executable, struct ckdist_step_stats* out,
                                           int32_t reset);
/* Rank 0, between two batches: the stats of every rank, (ranks,). */
CKDIST_EXPORT int ckdist_executable_reports(struct ckdist_executable* executable, struct ckdist_step_stats* out);

/* (layers, experts): how many rows each expert had so far, of all tokens that this rank's host computed. Not while a
   batch runs. */
CKDIST_EXPORT void ckdist_executable_expert_rows(const struct ckdist_executable* executable, int64_t* out);

/* From now on every thread writes what it does to a lane of its own ("thread 0"). Not while a batch runs; the trace
 * outlives the executable. */
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
