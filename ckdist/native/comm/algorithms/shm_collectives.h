// Collectives of ranks that share one host, through shared memory.
//
// Peers read and write buffers in the ranks' arenas in place, without staging. Other buffers go through slots of the
// rendezvous in chunks. Data that is only moved is written by its owner directly to the peers' buffers: to distant
// peers with streaming stores.
//
// If possible, a cache line is used by only two ranks, and the reader also writes it (unchanged if necessary). A line
// that one core writes and another core only reads stays shared between them. Its next write costs several times a
// fetch (measured: 2.5 times if caches are shared, 4 times if not). The method fails if the owner has read its line
// after writing it (measured: 1350 us instead of 195 us for 2 MiB each way between distant ranks). So the owner copies
// its own data while staging. Streaming stores avoid the problem too, but are slower if caches are shared.
#pragma once
#include <memory>

#include "comm/algorithms/cache_distance.h"
#include "comm/algorithms/collectives.h"
#include "comm/algorithms/order.h"
#include "comm/bootstrap/host_memory.h"
#include "comm/bootstrap/shm_rendezvous.h"
#include "core/stream_copy.h"

namespace ckdist {

class ShmCollectives : public Collectives {
 public:
  // arenas: for each rank of the rendezvous the index of its arena in `memory`.
  ShmCollectives(ShmRendezvous& rendezvous, std::shared_ptr<HostMemory> memory, std::vector<int> arenas,
                 const Thresholds& thresholds);

  void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) override;
  void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) override;
  void all_gather(const void* in, void* out, const int64_t* bytes) override;
  void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

 private:
  bool all_placed(uint32_t epoch, bool outs) const;
  int placed_outs(uint32_t epoch) const;  // number of ranks whose output is in an arena
  uint8_t* peer_in(int i, uint32_t epoch) const { return memory_->arena(arenas_[i]) + rendezvous_.record(i, epoch).in; }
  uint8_t* peer_out(int i, uint32_t epoch) const {
    return memory_->arena(arenas_[i]) + rendezvous_.record(i, epoch).out;
  }
  void reduce_in_place(uint32_t epoch, int64_t elements, Element e, ReduceOp op);
  void reduce_eager(const void* in, void* out, int64_t elements, Element e, ReduceOp op);
  void reduce_staged(const uint8_t* in, uint8_t* out, int64_t elements, Element e, ReduceOp op, uint32_t first);
  // Posts, waits for the other ranks, and measures their distance. Returns the epoch.
  uint32_t meet(const ShmRendezvous::Record& own, bool probe);
  template <class Stage, class Read>
  void through_slots(const ShmRendezvous::Record& own, uint32_t& now, bool staged, int64_t longest, int64_t piece,
                     const Stage& stage, const Read& read);
  int64_t* sizes(int i, uint32_t epoch) const;
  int64_t check_sizes(const int64_t* send_bytes, const int64_t* recv_bytes, uint32_t epoch) const;
  bool worth_direct_write(int64_t bytes) const;
  void write_to_peer(int i, uint8_t* to, const uint8_t* from, int64_t bytes, int64_t total) const;
  void stage(uint8_t* slot, const uint8_t* in, int64_t elements, int64_t element) const;
  void fetch(void* to, uint8_t* from, int64_t bytes) const;  // reads data that all peers of its owner read
  static void take(void* to, uint8_t* from, int64_t bytes);  // reads data that only this rank reads
  static void copy(void* to, const void* from, int64_t bytes);

  ShmRendezvous& rendezvous_;
  CacheDistance distance_;
  std::shared_ptr<HostMemory> memory_;
  std::vector<int> arenas_;
  Thresholds thresholds_;
  Order order_;
  std::vector<const void*> parts_;
  std::vector<void*> outs_;
  std::vector<int64_t> shifts_;
  std::vector<uint8_t> taken_, held_;  // buffers that grow to the size of the largest call
};

}  // namespace ckdist
