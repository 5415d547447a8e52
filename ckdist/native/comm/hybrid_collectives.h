// Collectives of ranks on several hosts, several on some: shared memory inside each host, messages between.
//
// A reduction is folded inside each host first; between hosts go whole hosts' results, moved by one rank of each host
// for small values, and by every rank together with its twins on the other hosts (each for its own slice) for large
// ones. What is gathered crosses to each host once.
#pragma once
#include "comm/flat_collectives.h"
#include "comm/host_memory.h"
#include "comm/meeting.h"

namespace ckdist {

class HybridCollectives : public FlatCollectives {
 public:
  HybridCollectives(std::shared_ptr<Channel> channel, const Order& order, const Thresholds& thresholds,
                    Meeting& meeting, std::shared_ptr<HostMemory> memory, std::vector<int> arenas);
  ~HybridCollectives() override;

  void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) override;
  void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) override;
  void all_gather(const void* in, void* out, const int64_t* bytes) override;
  void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

 private:
  static constexpr int64_t kSegment = 4 << 20;

  uint8_t* peer(int i, int64_t offset) const { return memory_->arena(arenas_[i]) + offset; }
  void exchange(uint8_t* partials, int64_t bytes, int index, const CallName& call);

  Meeting& meeting_;
  std::shared_ptr<HostMemory> memory_;
  std::vector<int> arenas_;
  int host_, index_, owners_;  // this rank's host, its place there, ranks of the smallest host
  uint8_t* room_;              // kSegment bytes in this rank's arena, for buffers that lie elsewhere
  int64_t room_offset_;
  std::vector<uint8_t> partials_;
  std::vector<void*> outs_;
};

}  // namespace ckdist
