// The collective operations of one group of ranks: the interface that each kind of group implements.
//
// All ranks make the same calls in the same order. `in` and `out` may be the same buffer (all_gather: `in` may be this
// rank's part of `out`) and must not overlap otherwise. Counts are by rank; parts follow each other without gaps. All
// implementations reduce in the order of comm/algorithms/order.h.
#pragma once
#include <cstdint>
#include <numeric>

#include "kernels/reduce.h"

namespace ckdist {

// Largest sizes of the algorithms for small data. They are the same on all ranks; `ckdist bench comm --tune` measures
// them.
struct Thresholds {
  int64_t direct_bytes = 8 << 10;             // shared memory, bytes * peers: every rank sends all to all peers
  int64_t transport_direct_bytes = 32 << 10;  // between hosts: every rank sends all to every other rank
  int64_t leaders_bytes = 32 << 10;           // several ranks on several hosts: only leaders exchange
  int64_t chunk_bytes = 512 << 10;            // minimum size of a chunk of a sum between hosts
};

inline int64_t sum_before(const int64_t* counts, int i) { return std::accumulate(counts, counts + i, int64_t(0)); }

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) = 0;
  // in: sum(counts) elements. out: counts[rank] elements.
  virtual void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) = 0;
  // in: bytes[rank] bytes. out: sum(bytes) bytes.
  virtual void all_gather(const void* in, void* out, const int64_t* bytes) = 0;
  virtual void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  virtual void barrier() = 0;
};

}  // namespace ckdist
