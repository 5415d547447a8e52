// Collectives of ranks that share one host, through its memory.
//
// Buffers that lie in the ranks' arenas are read, and written, in place by peers: nothing is staged. Others go through slots of
// the meeting, chunk by chunk: by cached stores, which win where the ranks' cores share caches, or by streaming stores, which win
// where they do not; which it is can change while a program runs, so it is measured now and then on the calls themselves.
#pragma once
#include <memory>

#include "comm/collectives.h"
#include "comm/host_memory.h"
#include "comm/meeting.h"
#include "comm/order.h"

namespace ckdist {

class HostCollectives : public Collectives {
 public:
  // arenas: where the arena of each rank of the meeting stands in `memory`.
  HostCollectives(Meeting& meeting, std::shared_ptr<HostMemory> memory, std::vector<int> arenas, const Thresholds& thresholds);

  void all_reduce(const void* in, void* out, int64_t elements, Element e, ReduceOp op) override;
  void reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) override;
  void all_gather(const void* in, void* out, const int64_t* bytes) override;
  void all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

 private:
  // Stores for sizes of one power of two: tries both kinds every so often and keeps the faster one until the next trial.
  struct Probe {
    int64_t calls = 0;
    double cached_ns = 0, streamed_ns = 0;
    bool begin();               // streaming?
    void end(int64_t bytes);
    int64_t start = 0;          // 0: not a trial
  };

  bool all_placed(uint32_t epoch, bool outs) const;
  const uint8_t* peer_in(int i, uint32_t epoch) const { return memory_->arena(arenas_[i]) + meeting_.record(i, epoch).in; }
  uint8_t* peer_out(int i, uint32_t epoch) const { return memory_->arena(arenas_[i]) + meeting_.record(i, epoch).out; }
  void reduce_in_place(uint32_t epoch, int64_t elements, Element e, ReduceOp op);
  void reduce_staged(const uint8_t* in, uint8_t* out, int64_t elements, Element e, ReduceOp op, uint32_t first);
  void reduce_staged_slices(const uint8_t* in, uint8_t* out, int64_t elements, Element e, ReduceOp op, uint32_t first);
  void fill(void* to, const void* from, int64_t bytes) { copy(to, from, bytes, streaming_); }
  static void copy(void* to, const void* from, int64_t bytes, bool stream);

  Meeting& meeting_;
  std::shared_ptr<HostMemory> memory_;
  std::vector<int> arenas_;
  Thresholds thresholds_;
  Order order_;
  std::vector<const void*> parts_;
  std::vector<void*> outs_;
  Probe placed_[48], staged_[48];  // by the size's power of two
  bool streaming_ = false;
};

}  // namespace ckdist
