// How long a rank has waited for another, with which patience, and how errors name the call in which it waits.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/futex.h"

namespace ckdist {

// "all_reduce 17", "step 5"; without a number "a message".
struct CallName {
  const char* name = "";
  int64_t number = -1;
  std::string text() const { return number < 0 ? name : name + (" " + std::to_string(number)); }
  std::string context() const { return *name ? " (in " + text() + ")" : ""; }  // behind an error
};

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

// A rank that waits for a message polls, then yields to other threads, then sleeps at most `nap_ns` at a time.
struct Patience {
  int64_t spin_ns, yield_ns, nap_ns;
};

// Beyond the timeout, for a rank on another host that may itself wait for a third: it has time to say so, and the error
// names the rank that is lost.
inline int64_t peer_grace_ns(int64_t timeout_ns) {
  return std::clamp<int64_t>(timeout_ns / 10, 250'000'000, 500'000'000);
}

}  // namespace ckdist
