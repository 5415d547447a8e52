// Collectives of ranks on several hosts: shared memory inside each host, messages between hosts.
//
// A reduction is folded inside each host first. Then the hosts' results are exchanged: small results by one rank of
// each host (the leader); large results by every rank with the ranks of the same local rank, each for its own slice.
// Gathered data is sent to each host once.
#pragma once
#include "comm/algorithms/flat_collectives.h"
#include "comm/bootstrap/host_memory.h"
#include "comm/bootstrap/shm_rendezvous.h"

namespace ckdist {

class HierarchicalCollectives : public FlatCollectives {
 public:
  HierarchicalCollectives(std::shared_ptr<Channel> channel, const Order& order, const Thresholds& thresholds,
                          ShmRendezvous& rendezvous, std::shared_ptr<HostMemory> memory, std::vector<int> arenas);
  ~HierarchicalCollectives() override;

  void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) override;
  void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) override;
  void all_gather(const void* in, void* out, const int64_t* bytes) override;
  void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

 private:
  static constexpr int64_t kSegment = 4 << 20;

  uint8_t* peer(int i, int64_t offset) const { return memory_->arena(arenas_[i]) + offset; }
  CallName begin(const char* name, uint64_t signature);
  void exchange(uint8_t* partials, int64_t bytes, int index, const CallName& call);

  ShmRendezvous& rendezvous_;
  std::shared_ptr<HostMemory> memory_;
  std::vector<int> arenas_;
  int host_, index_, leaders_;  // this rank's host, its local rank, number of ranks of the smallest host
  uint8_t* staging_;            // kSegment bytes of this rank's arena, for buffers outside arenas
  int64_t staging_offset_;
  std::vector<uint8_t> partials_;
  std::vector<void*> outs_;
};

}  // namespace ckdist
