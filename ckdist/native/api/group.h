#ifndef CKDIST_API_GROUP_H
#define CKDIST_API_GROUP_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Ranks that meet. An executable uses a group from its own threads; the calls below are for whoever has no executable.
 */

struct ckdist_group;
struct ckdist_wire;

/* `spins`: polls before a waiting thread sleeps or lets others run; `timeout_s`: seconds that any wait for a peer may
   take. Ranks of one host over shared memory. Rank 0 passes no path; the others pass what ckdist_group_path gives on
   rank 0. */
CKDIST_EXPORT int ckdist_host_group(const char* path, int32_t rank, int32_t size, int32_t spins, double timeout_s,
                                    struct ckdist_group** out);
/* Ranks of several hosts: shared memory inside each, and a wire, which belongs to the group, between them. host_of: a
   number per rank, equal for ranks that share memory; the first rank of each host passes no path, its others what
   ckdist_group_path gives there. direct_bytes and leaders_bytes: thresholds as in ckdist_thresholds (wire_direct_bytes,
   leaders_bytes), the same everywhere. */
CKDIST_EXPORT int ckdist_wire_group(struct ckdist_wire* wire, const char* path, int32_t rank, int32_t size,
                                    const int32_t* host_of, int64_t direct_bytes, int64_t leaders_bytes, int32_t spins,
                                    double timeout_s, struct ckdist_group** out);
/* Seconds of one exchange of `bytes` with `peer`, which makes the same call: the median of `calls`. Not once a group
 * has the wire. */
CKDIST_EXPORT int ckdist_wire_time(struct ckdist_wire* wire, int32_t peer, int64_t bytes, int32_t calls, double* out);
CKDIST_EXPORT const char* ckdist_group_path(struct ckdist_group* group);
CKDIST_EXPORT void ckdist_group_free(struct ckdist_group* group);
/* Fails when a peer is known to be dead or silent; for a rank that is between steps. */
CKDIST_EXPORT int ckdist_group_check_peers(struct ckdist_group* group);

/* Makes the buffers: partial values of at most `partial_floats`; logits (logit_rows, vocab), of which this rank has
   `columns` from `first_column`; messages of at most `message_ints`. All ranks, once, first. */
CKDIST_EXPORT int ckdist_group_reserve(struct ckdist_group* group, int64_t partial_floats, int64_t logit_rows,
                                       int64_t vocab, int64_t first_column, int64_t columns, int64_t message_ints);
/* Rank 0's message to every other rank, which has it until it receives the next. One of no ints is the last. */
CKDIST_EXPORT int ckdist_group_publish(struct ckdist_group* group, const int32_t* message, int64_t ints);
CKDIST_EXPORT int ckdist_group_receive(struct ckdist_group* group, const int32_t** message, int64_t* ints);
/* This rank's part of the value in slot 0 or 1; slots alternate. */
CKDIST_EXPORT float* ckdist_group_partial(struct ckdist_group* group, int32_t slot);
CKDIST_EXPORT int ckdist_group_reduce(struct ckdist_group* group, int32_t slot, int64_t floats, int32_t step);
/* The summands of the value in `slot`, in their order, into parts[256]; returns their number. */
CKDIST_EXPORT int ckdist_group_parts(struct ckdist_group* group, int32_t slot, const float** parts);
/* This rank's columns of row 0 of the logits, and the floats from row to row. */
CKDIST_EXPORT float* ckdist_group_logits(struct ckdist_group* group, int64_t* stride);
CKDIST_EXPORT int ckdist_group_gather(struct ckdist_group* group, int64_t rows, int32_t step);
CKDIST_EXPORT const float* ckdist_group_gathered(struct ckdist_group* group);
/* Tells the peers that this rank cannot go on, and why. */
CKDIST_EXPORT void ckdist_group_abandon(struct ckdist_group* group, const char* reason);
/* Nothing is called any more, and no thread of the group calls MPI: to be called before MPI ends. */
CKDIST_EXPORT int ckdist_group_leave(struct ckdist_group* group);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
