// Ranks on several hosts, meeting through MPI's point-to-point calls.
//
// Every wait polls MPI_Test against a deadline, so a peer that is gone is an error that names it. Sums run in rank order
// (see Group). MPI must allow calls from several threads at once (MPI_THREAD_MULTIPLE).
#pragma once
#include <optional>
#include <vector>

#include "comm/group.h"
#include "comm/mpi_calls.h"
#include "comm/mpi_pulse.h"
#include "core/arena.h"

namespace ckdist {

class MpiGroup : public Group {
 public:
  // `spins`: as of HostGroup; a waiting thread polls about as long before it lets others run.
  MpiGroup(const MpiCalls& calls, int rank, int size, int spins, double timeout_s);

  void reserve(const GroupSizes& sizes) override;
  void publish(const int32_t* message, int64_t ints) override;
  const int32_t* receive(int64_t* ints) override;
  float* partial(int slot) override { return partial_[slot]; }
  void reduce(int slot, int64_t floats, int step) override;
  int parts(int slot, const float** out) override;
  float* logits(int64_t* stride) override;
  void gather(int64_t rows, int step) override;
  const float* gathered() override { return logits_; }
  void check_peers() override;

 private:
  // Up to this many bytes a value goes whole to every rank in one exchange; larger ones are summed slice by slice.
  static constexpr int64_t kDirectBytes = 64 << 10;
  static constexpr int64_t kRowsAtOnce = 64;  // rows of logits under way from each rank

  struct Share { int64_t first, columns; };  // of the logits

  void send(int peer, int tag, const void* data, int64_t bytes);
  void receive(int peer, int tag, void* data, int64_t bytes);
  void wait(int step);  // for all requests begun since the last wait
  void wait_idle();     // for a message from rank 0, mostly asleep
  [[noreturn]] void give_up(size_t first, int step);
  float* arrived(int slot, int rank) { return arrived_[slot] + rank * direct_floats_; }

  const MpiCalls calls_;
  const int spins_;
  const int64_t timeout_ns_;
  int64_t idle_since_ = 0;   // rank 0: end of the last step
  std::vector<MpiRequest> requests_;
  GroupSizes sizes_{};
  int64_t direct_floats_ = 0, slice_floats_ = 0;
  std::optional<Arena> memory_;
  float* partial_[kSlots] = {};
  float* sum_[kSlots] = {};      // the whole value, of a large reduce
  float* arrived_[kSlots] = {};  // the peers' parts, of a small one
  bool direct_[kSlots] = {};
  float* slices_ = nullptr;      // the peers' parts of this rank's slice
  float* logits_ = nullptr;      // (rows, vocab) on rank 0, (rows, columns) on the others
  int32_t* message_ = nullptr;   // its length, then the message
  std::vector<Share> shares_;    // rank 0: of every rank
  std::optional<MpiPulse> pulse_;  // rank 0, from reserve() to the last message
};

}  // namespace ckdist
