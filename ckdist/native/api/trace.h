#ifndef CKDIST_API_TRACE_H
#define CKDIST_API_TRACE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* What a rank's threads did, and when: a lane for each thread, of which the newest events are kept. */

enum {
  ckdist_trace_step = 0,     /* of a replay: its index, phase */
  ckdist_trace_barrier = 1,  /* waiting for the rank's own threads: index of the step, phase */
  ckdist_trace_exchange = 2, /* a collective: index of the step, phase */
  ckdist_trace_prefill = 3,  /* a batch with prompts: tokens, sequences, phase */
  ckdist_trace_decode = 4,   /* a batch without: tokens, sequences, phase */
  ckdist_trace_publish = 5,  /* giving a batch to the other ranks: tokens, sequences, phase */
  ckdist_trace_transition =
      6,                     /* from the end of a prefill by tokens to the beginning of the decode step that follows */
  ckdist_trace_schedule = 7, /* rank 0 between steps: tokens, sequences of the batch to come */
  ckdist_trace_run = 8,      /* the step, as its caller sees it */
  ckdist_trace_sample = 9,   /* logits to tokens: sequences */
  ckdist_trace_receive = 10, /* messages of clients */
  ckdist_trace_send = 11,    /* tokens to clients: messages */
  ckdist_trace_load = 12,    /* reading and packing weights */
  ckdist_trace_choose = 13,  /* measuring how to shard prefill */
  ckdist_trace_copy = 14     /* weights moved in the background: KiB */
};

struct ckdist_trace_event {
  int64_t begin, end;
  int32_t kind, args[3];
}; /* nanoseconds of CLOCK_MONOTONIC */

struct ckdist_trace;
struct ckdist_trace_lane;

/* `events`: that a lane keeps. Lanes live as long as their trace; a lane is written by one thread at a time. */
CKDIST_EXPORT int ckdist_trace_new(int64_t events, struct ckdist_trace** out);
CKDIST_EXPORT void ckdist_trace_free(struct ckdist_trace* trace);
CKDIST_EXPORT int ckdist_trace_add_lane(struct ckdist_trace* trace, const char* name, struct ckdist_trace_lane** out);
CKDIST_EXPORT void ckdist_trace_add(struct ckdist_trace_lane* lane, int32_t kind, int64_t begin, int64_t end,
                                    int32_t first, int32_t second, int32_t third);
CKDIST_EXPORT int32_t ckdist_trace_lanes(struct ckdist_trace* trace);
CKDIST_EXPORT const char* ckdist_trace_lane_name(struct ckdist_trace* trace, int32_t lane);
/* The newest events of a lane, oldest first, into out[events]; returns their number. `dropped`: how many came before
 * them. */
CKDIST_EXPORT int64_t ckdist_trace_read(struct ckdist_trace* trace, int32_t lane, struct ckdist_trace_event* out,
                                        int64_t* dropped);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
