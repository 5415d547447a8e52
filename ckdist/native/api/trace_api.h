#pragma once
#include "api/export.h"

/* The times of the work of a rank's threads: a lane for each thread, which keeps the newest events. */

enum {
  ckdist_trace_step = 0,     /* of a batch: its index, phase */
  ckdist_trace_barrier = 1,  /* waiting for the rank's own threads: index of the step, phase */
  ckdist_trace_exchange = 2, /* a collective: index of the step, phase */
  ckdist_trace_prefill = 3,  /* a batch with prompts: tokens, sequences, phase */
  ckdist_trace_decode = 4,   /* a batch without prompts: tokens, sequences, phase */
  ckdist_trace_publish = 5,  /* publishing a batch to the other ranks: tokens, sequences, phase */
  /* From the end of a token-parallel prefill to the beginning of the next decode step. */
  ckdist_trace_transition = 6,
  ckdist_trace_schedule = 7,     /* rank 0 between steps: tokens, sequences of the next batch */
  ckdist_trace_run = 8,          /* the step, as its caller measures it */
  ckdist_trace_sample = 9,       /* logits to tokens: sequences */
  ckdist_trace_receive = 10,     /* messages of clients */
  ckdist_trace_send = 11,        /* tokens to clients: messages */
  ckdist_trace_load = 12,        /* reading and packing weights */
  ckdist_trace_choose = 13,      /* measuring how to shard prefill */
  ckdist_trace_copy = 14,        /* moving weights in the background: KiB */
  ckdist_trace_copy_blocks = 15, /* blocks of a cache beside steps: blocks, 1 if into the cache */
  /* A chunk of a sum between hosts, until its arrival is seen: index of the step, phase, number of the chunk. It begins
     when this rank begins to send it, or when the chunk before has arrived. */
  ckdist_trace_sum = 16,
  ckdist_trace_data = 17,   /* training: batches of a step */
  ckdist_trace_update = 18, /* training: the optimizer */
  ckdist_trace_save = 19    /* training: the pause for a checkpoint */
};

struct ckdist_trace_event {
  int64_t begin, end;
  int32_t kind, args[3];
}; /* nanoseconds of CLOCK_MONOTONIC */

struct ckdist_trace;
struct ckdist_trace_lane;

/* `events`: number of events that a lane keeps. Lanes live as long as their trace. One thread at a time writes a
   lane. */
CKDIST_EXPORT int ckdist_trace_new(int64_t events, struct ckdist_trace** out);
CKDIST_EXPORT void ckdist_trace_free(struct ckdist_trace* trace);
CKDIST_EXPORT int ckdist_trace_add_lane(struct ckdist_trace* trace, const char* name, struct ckdist_trace_lane** out);
CKDIST_EXPORT void ckdist_trace_add(struct ckdist_trace_lane* lane, int32_t kind, int64_t begin, int64_t end,
                                    int32_t first, int32_t second, int32_t third);
CKDIST_EXPORT int32_t ckdist_trace_lanes(struct ckdist_trace* trace);
CKDIST_EXPORT const char* ckdist_trace_lane_name(struct ckdist_trace* trace, int32_t lane);
/* Copies the newest events of a lane, oldest first, to out[events]; returns their number. `dropped`: number of
   earlier events. */
CKDIST_EXPORT int64_t ckdist_trace_read(struct ckdist_trace* trace, int32_t lane, struct ckdist_trace_event* out,
                                        int64_t* dropped);
