// Which peers of a host are far: in whose caches a line takes long to fetch, since no cache is shared with them.
//
// It decides how large data moves, and it changes while a program runs where CPUs are virtual. So it is felt now and
// then: every rank writes a line before it meets the others and looks how long theirs take to come (measured: 40 ns
// where caches are shared, 140 where they are not, of which the clock is 20). An interruption lengthens a look and
// nothing shortens one, so the shortest of the last few counts.
#pragma once
#include <array>
#include <vector>

#include "comm/meeting.h"

namespace ckdist {

class Reach {
 public:
  explicit Reach(Meeting& meeting) : meeting_(meeting), felt_(meeting.size) {}

  void mark();  // before a post
  void look();  // after that meeting: at who has marked
  bool far(int i) const;
  bool any_far() const;

 private:
  static constexpr int kLooks = 2;
  static constexpr uint64_t kEvery = 13;  // calls
  static constexpr int64_t kFarNs = 90;
  bool due() const { return meeting_.calls() % kEvery == 0; }

  Meeting& meeting_;
  uint32_t looks_ = 0;
  std::vector<std::array<int64_t, kLooks>> felt_;  // nanoseconds, by rank
};

}  // namespace ckdist
