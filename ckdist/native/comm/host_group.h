// Ranks of one host, meeting in one shared-memory segment.
//
// Partial values are written where every rank can read them and are never copied: a reader sums the ranks' buffers in place.
// Each rank's region is touched first by its owner, so its pages lie on the owner's node. The segments have no name in any
// file system: nothing is left behind however the ranks end.
#pragma once
#include <string>

#include "comm/group.h"
#include "core/futex.h"

namespace ckdist {

class HostGroup : public Group {
 public:
  // Rank 0 creates the segment and ignores `path`; the others get rank 0's path() by the caller's means, and rank 0 must live
  // until all of them have opened it. `spins`: polls before a waiting thread sleeps.
  HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s);
  ~HostGroup() override;
  const std::string& path() const { return path_; }

  void reserve(int64_t partial_floats, int64_t logit_rows, int64_t vocab, int64_t message_ints) override;
  void publish(const int32_t* message, int64_t ints) override;
  const int32_t* receive(int64_t* ints) override;
  float* partial(int slot) override;
  void reduce(int slot, int64_t floats, int step) override;
  int parts(int slot, const float** out) override;
  float* logits(int64_t column, int64_t columns, int64_t* stride) override;
  void gather(int64_t rows, int64_t column, int64_t columns, int step) override;
  const float* gathered() override;
  void check_peers() override;
  void abandon() override;

 private:
  struct Line;     // one rank's flags
  struct Header;
  static uint8_t* create(int64_t bytes, std::string* path);
  static uint8_t* map(const std::string& path, int64_t bytes);
  void meet(int step);  // a barrier of all ranks
  void check_alive(int rank, int step) const;

  std::string path_;
  int spins_;
  int64_t timeout_ns_;
  uint32_t epoch_ = 0, message_ = 0;
  Header* header_ = nullptr;
  uint8_t* data_ = nullptr;
  int64_t header_bytes_ = 0, data_bytes_ = 0, partial_bytes_ = 0, logits_offset_ = 0, mail_offset_ = 0, mail_ints_ = 0, vocab_ = 0;
};

}  // namespace ckdist
