// Ranks of one host, meeting in one shared-memory segment.
//
// Partial values are written where every rank can read them and are never copied: a reader sums the ranks' buffers in place.
// Each rank's region is touched first by its owner, so its pages lie on the owner's node. Ranks are processes, or threads of
// one process with a group each.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/segment.h"
#include "core/futex.h"

namespace ckdist {

class HostGroup : public Group {
 public:
  // Rank 0 creates the segment and ignores `path`; the others get rank 0's path() by the caller's means, and rank 0 must live
  // until all of them have opened it. `spins`: polls before a waiting thread sleeps.
  HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s);
  const std::string& path() const { return control_->path(); }

  void reserve(const GroupSizes& sizes) override;
  void publish(const int32_t* message, int64_t ints) override;
  const int32_t* receive(int64_t* ints) override;
  float* partial(int slot) override { return part(rank, slot); }
  void reduce(int slot, int64_t floats, int step) override;
  int parts(int slot, const float** out) override;
  float* logits(int64_t* stride) override;
  void gather(int64_t rows, int step) override;
  const float* gathered() override { return logits_; }
  void check_peers() override;
  void abandon() override;

 private:
  struct Line;     // one rank's flags
  struct Header;
  void meet(int step);  // a barrier of all ranks
  void wait_for(Signal& signal, uint32_t count, int rank, int step);
  void check_alive(int rank, int step);
  void check_awake(int rank);
  float* part(int r, int slot) const { return reinterpret_cast<float*>(data_->data() + (int64_t(r) * kSlots + slot) * partial_bytes_); }

  int spins_;
  int64_t timeout_ns_;
  uint32_t epoch_ = 0, message_ = 0;  // exchanges this rank has begun, messages it has seen
  std::optional<Segment> control_, data_;
  Header* header_ = nullptr;
  GroupSizes sizes_{};
  int64_t partial_bytes_ = 0;
  float* logits_ = nullptr;            // (rows, vocab)
  int32_t* mailbox_ = nullptr;         // the message being handed over
  std::vector<int32_t> received_;      // the message this rank has
  std::vector<int64_t> stopped_since_; // when each peer was first seen stopped, else 0
};

}  // namespace ckdist
