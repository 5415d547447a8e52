// Ranks on several hosts, meeting through MPI's point-to-point calls, whichever implementation the launcher brought.
//
// The library is not linked: the caller hands over the addresses of four functions and the values of two handles, which are
// ints in some implementations and pointers in others and travel in one register either way. Every wait polls MPI_Test
// against a deadline, so a peer that is gone is an error that names it. Sums run in rank order (see Group).
#pragma once
#include <optional>
#include <vector>

#include "comm/group.h"
#include "core/arena.h"

namespace ckdist {

struct MpiCalls {
  int (*isend)(const void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*irecv)(void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*test)(void* request, int* flag, void* status);
  void* byte;  // MPI_BYTE
  void* comm;  // a communicator of our own
};

class MpiGroup : public Group {
 public:
  MpiGroup(const MpiCalls& calls, int rank, int size, double timeout_s);

  void reserve(int64_t partial_floats, int64_t logit_rows, int64_t vocab, int64_t message_ints) override;
  void publish(const int32_t* message, int64_t ints) override;
  const int32_t* receive(int64_t* ints) override;
  float* partial(int slot) override;
  void reduce(int slot, int64_t floats, int step) override;
  int parts(int slot, const float** out) override;
  float* logits(int64_t column, int64_t columns, int64_t* stride) override;
  void gather(int64_t rows, int64_t column, int64_t columns, int step) override;
  const float* gathered() override;

 private:
  // Up to this many bytes a value goes whole to every rank in one exchange; larger ones are summed slice by slice.
  static constexpr int64_t kDirectBytes = 64 << 10;

  struct Request {
    alignas(16) uint8_t handle[16];
    int peer;
    bool done;
  };
  void send(int peer, int tag, const void* data, int64_t bytes);
  void receive(int peer, int tag, void* data, int64_t bytes);
  void wait(int step, bool idle = false);  // for all requests begun since the last wait
  float* arrived(int slot, int rank) { return arrived_[slot] + rank * direct_floats_; }

  MpiCalls calls_;
  int64_t timeout_ns_;
  std::vector<Request> requests_;
  std::optional<Arena> memory_;
  float* partial_[kSlots];
  float* sum_[kSlots];       // the whole value, of a large reduce
  float* arrived_[kSlots];   // the peers' parts, of a small one
  bool direct_[kSlots] = {};
  float* slices_;            // the peers' parts of this rank's slice
  int64_t partial_floats_ = 0, direct_floats_ = 0, slice_floats_ = 0, logit_rows_ = 0, vocab_ = 0, message_ints_ = 0;
  float* logits_;            // (rows, vocab) on rank 0
  uint8_t* columns_;         // what a rank sends to rank 0: its first column and their number, then (rows, columns)
  uint8_t* inbox_;           // rank 0: one of these per rank
  int32_t* message_;         // its length, then the message
};

}  // namespace ckdist
