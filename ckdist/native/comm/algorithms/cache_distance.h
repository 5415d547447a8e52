// Which peers of a host are distant: no cache is shared with them, so fetching one of their lines takes long.
//
// It decides how large data moves. Where CPUs are virtual it changes while a program runs, so it is measured again
// every 13 calls: every rank writes a line before a barrier, and times how long the others' lines take to come (40 ns
// where caches are shared, 140 where they are not, of which the clock is 20). An interruption can only lengthen a
// measurement, so the shortest of the last few counts.
#pragma once
#include <array>
#include <vector>

#include "comm/bootstrap/shm_rendezvous.h"

namespace ckdist {

class CacheDistance {
 public:
  explicit CacheDistance(ShmRendezvous& rendezvous) : rendezvous_(rendezvous), measured_(rendezvous.size) {}

  void write_probe();  // before a barrier
  void measure();      // after it
  bool distant(int i) const;
  bool any_distant() const;

 private:
  static constexpr int kKept = 2;
  static constexpr uint64_t kEvery = 13;  // calls
  static constexpr int64_t kDistantNs = 90;
  bool due() const { return rendezvous_.calls() % kEvery == 0; }

  ShmRendezvous& rendezvous_;
  uint32_t measurements_ = 0;
  std::vector<std::array<int64_t, kKept>> measured_;  // nanoseconds, by rank
};

}  // namespace ckdist
