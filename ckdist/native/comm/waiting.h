// How long a rank has waited for another, and how error messages name the point of a step at which they were to meet.
#pragma once
#include <cstdio>

#include "comm/group.h"
#include "core/futex.h"

namespace ckdist {

// Time since it was made, but for gaps in which this process itself did not run (stopped by a terminal, a machine
// asleep): what the peer did meanwhile is not known.
class Waited {
 public:
  int64_t ns() {
    const int64_t now = now_ns();
    if (now - last_ > kGapNs) start_ += now - last_;
    last_ = now;
    return now - start_;
  }

 private:
  static constexpr int64_t kGapNs = 1'000'000'000;
  int64_t start_ = now_ns(), last_ = start_;
};

struct Place {
  char text[64];
};

inline Place place(int step) {
  Place p;
  if (step == kStart) std::snprintf(p.text, sizeof p.text, "the start");
  else std::snprintf(p.text, sizeof p.text, "step %d", step);
  return p;
}

inline Place at_or_before(int step) {
  Place p;
  if (step == kBetween) std::snprintf(p.text, sizeof p.text, "between steps");
  else std::snprintf(p.text, sizeof p.text, "at or before %.40s", place(step).text);
  return p;
}

}  // namespace ckdist
