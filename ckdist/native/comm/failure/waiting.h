// How long and how patiently a rank waits for another, and the name of the waiting call in errors.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/futex.h"

namespace ckdist {

// "all_reduce 17" or "step 5"; "a message" without a number.
struct CallName {
  const char* name = "";
  int64_t number = -1;
  std::string text() const { return number < 0 ? name : name + (" " + std::to_string(number)); }
  std::string context() const { return *name ? " (in " + text() + ")" : ""; }  // suffix of an error
};

// Time since construction, without gaps in which this process did not run (stopped by a terminal, or the machine
// slept). The state of the peer during such a gap is unknown.
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

// A rank that waits for a message first polls, then yields to other threads, then sleeps at most `nap_ns` at a time.
struct Patience {
  int64_t spin_ns, yield_ns, nap_ns;
};

// Extra time after the timeout for a rank on another host, which may itself wait for a third rank. It has time to
// report that, so that the error names the lost rank.
inline int64_t peer_grace_ns(int64_t timeout_ns) {
  return std::clamp<int64_t>(timeout_ns / 10, 250'000'000, 500'000'000);
}

}  // namespace ckdist
