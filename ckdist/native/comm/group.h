// What a replay needs of the other ranks: batches from rank 0, sums of partial values, logits at rank 0.
//
// One thread of a rank calls a group at a time; how a rank's own threads meet is the pool's affair. A step begins with
// a message and ends with gather(). Sums run in float32 in the order of comm/order.h: the ranks of a host, then the
// hosts.
#pragma once
#include <cstdint>

#include "core/futex.h"

namespace ckdist {

constexpr int kMaxRanks = 256;
constexpr int kSlots =
    2;  // partial values alternate: a slot is written again only after everyone passed the next exchange
constexpr int kStart = -1;    // the step of what ranks do before the first batch
constexpr int kBetween = -2;  // no step: rank 0 has nothing to do

struct GroupSizes {
  int64_t partial_floats;         // of one partial value, at most
  int64_t logit_rows, vocab;      // of the gathered logits, at most
  int64_t first_column, columns;  // of the logits that this rank computes
  int64_t message_ints;           // of one message, at most
};

class Group {
 public:
  Group(int rank, int size) : Group(rank, size, rank, size) {}
  Group(int rank, int size, int local_rank, int local_size)
      : rank(rank), size(size), local_rank(local_rank), local_size(local_size) {}
  virtual ~Group() = default;
  const int rank, size;
  const int local_rank, local_size;  // among the ranks that share memory with this one

  // Makes the buffers; every rank calls it, once, before anything else.
  virtual void reserve(const GroupSizes& sizes) = 0;

  // Rank 0 gives every other rank one message; the others wait for it without burning a core, and have it until they
  // receive the next. Messages may follow one another at once. An empty message is the last one.
  virtual void publish(const int32_t* message, int64_t ints) = 0;
  virtual const int32_t* receive(int64_t* ints) = 0;

  // Where this rank writes its part of the value in `slot`.
  virtual float* partial(int slot) = 0;
  // Returns when parts(slot) may be read. `step` names the place in error messages.
  virtual void reduce(int slot, int64_t floats, int step, Idle idle) = 0;
  // The summands of the value in `slot`, in their order; their sum from the first to the last is the value.
  virtual int parts(int slot, const float** out) = 0;

  // The values in `slot` of the ranks that share memory, by local rank.
  virtual void peers(int slot, const float** out) = 0;
  // Returns when these may be read there.
  virtual void exchange(int step, Idle idle) = 0;

  // A value that is partial over hosts alone: where a host's ranks together write theirs, and what returns when
  // parts(slot) may be read.
  virtual float* host_partial(int slot, int64_t floats) = 0;
  virtual void reduce_hosts(int slot, int64_t floats, int step, Idle idle) = 0;

  // Where this rank writes its columns of the logits, and the floats from row to row.
  virtual float* logits(int64_t* stride) = 0;
  // Returns when rank 0 may read all columns at gathered(), as (rows, vocab), until it publishes again.
  virtual void gather(int64_t rows, int step) = 0;
  virtual const float* gathered() = 0;

  // Throws when a peer is known to be dead, or silent for longer than the timeout; for a rank that is between steps.
  virtual void check_peers() = 0;
  // Tells the peers that this rank cannot go on, and why.
  virtual void abandon(const char* reason) = 0;
  // This rank calls nothing any more, and no thread of the group does: its peers miss it no longer.
  virtual void leave() {}
};

}  // namespace ckdist
