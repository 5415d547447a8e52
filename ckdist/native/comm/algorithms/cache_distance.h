// Measures which ranks of a host are distant: they share no cache with this rank, so reading one of their lines is
// slow.
//
// Large data moves differently to distant ranks. The distance is measured again every 13 calls, because virtual CPUs
// can change it during a run. Every rank writes a line before a barrier, and times the reads of the other ranks' lines
// after it. A read takes 40 ns if caches are shared, 140 ns if not; both include 20 ns of the clock. Interruptions only
// lengthen a measurement, so the shortest of the last few is used.
#pragma once
#include <array>
#include <vector>

#include "comm/bootstrap/shm_rendezvous.h"

namespace ckdist {

class CacheDistance {
 public:
  explicit CacheDistance(ShmRendezvous& rendezvous) : rendezvous_(rendezvous), measured_(rendezvous.size) {}

  void write_probe();  // call before a barrier
  void measure();      // call after the barrier
  bool distant(int i) const;
  bool any_distant() const;

 private:
  static constexpr int kKept = 2;
  static constexpr uint64_t kEvery = 13;  // calls between two measurements
  static constexpr int64_t kDistantNs = 90;
  bool due() const { return rendezvous_.calls() % kEvery == 0; }

  ShmRendezvous& rendezvous_;
  uint32_t measurements_ = 0;
  std::vector<std::array<int64_t, kKept>> measured_;  // nanoseconds, by rank
};

}  // namespace ckdist
