// The collective operations of one group of ranks: what a Communicator calls, and what each kind of group does its own
// way.
//
// All ranks make the same calls in the same order. `in` and `out` may be the same buffer (of all_gather: `in` may lie
// at its own place in `out`), and may not overlap otherwise. Counts are by rank; offsets follow from them without gaps.
// Reductions fold as comm/algorithms/order.h says, on every implementation.
#pragma once
#include <cstdint>

#include "kernels/reduce.h"

namespace ckdist {

// Largest sizes of the small algorithms; the same on all ranks. Measured by `ckdist bench comm --tune`.
struct Thresholds {
  int64_t direct_bytes = 8 << 10;             // shared memory, times the peers: every rank gives all peers everything
  int64_t transport_direct_bytes = 32 << 10;  // between hosts: every rank sends everything to every other
  int64_t leaders_bytes = 32 << 10;           // several ranks on several hosts: leaders alone exchange
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) = 0;
  // in: sum(counts) elements; out: counts[rank].
  virtual void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) = 0;
  // in: bytes[rank]; out: sum(bytes).
  virtual void all_gather(const void* in, void* out, const int64_t* bytes) = 0;
  virtual void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  virtual void barrier() = 0;
};

}  // namespace ckdist
