// Ranks of one host, meeting in shared memory.
//
// Partial values are written where every rank can read them and are never copied: a reader sums the ranks' buffers in
// place. Each rank's region is touched first by its owner, so its pages lie on the owner's node.
#pragma once
#include "comm/group.h"
#include "comm/host_ranks.h"
#include "core/error.h"

namespace ckdist {

class HostGroup : public Group {
 public:
  // As HostRanks: of ranks 0 to size - 1, which all are on this host.
  HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s);
  const std::string& path() const { return ranks_.path(); }

  void reserve(const GroupSizes& sizes) override;
  void publish(const int32_t* message, int64_t ints) override { ranks_.publish(message, ints); }
  const int32_t* receive(int64_t* ints) override { return ranks_.receive(ints); }
  float* partial(int slot) override { return part(rank, slot); }
  void reduce(int, int64_t, int step, Idle idle) override { ranks_.meet(step, 0, idle); }
  int parts(int slot, const float** out) override;
  void peers(int slot, const float** out) override { parts(slot, out); }
  void exchange(int step, Idle idle) override { ranks_.meet(step, 0, idle); }
  float* host_partial(int, int64_t) override {
    fail(Status::native, "one host has no values that are partial over hosts");
  }
  void reduce_hosts(int, int64_t, int, Idle) override {}
  float* logits(int64_t* stride) override;
  void gather(int64_t, int step) override { ranks_.meet(step); }
  const float* gathered() override { return logits_; }
  void check_peers() override { ranks_.check(); }
  void abandon(const char* reason) override { ranks_.abandon(reason); }

 private:
  float* part(int r, int slot) const {
    return reinterpret_cast<float*>(data_ + (int64_t(r) * kSlots + slot) * partial_bytes_);
  }

  HostRanks ranks_;
  GroupSizes sizes_{};
  uint8_t* data_ = nullptr;
  int64_t partial_bytes_ = 0;
  float* logits_ = nullptr;  // (rows, vocab)
};

}  // namespace ckdist
