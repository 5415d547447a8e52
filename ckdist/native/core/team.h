// The threads that make a step together, as one of them sees them.
#pragma once
#include <cstdint>

#include "core/range.h"

namespace ckdist {

class Team {
 public:
  Team(int thread, int threads) : thread(thread), threads(threads) {}
  const int thread, threads;

  // Of n items those of this thread.
  Range share(int64_t n) const { return {n * thread / threads, n * (thread + 1) / threads}; }
  // All threads meet. The last to arrive runs `last()` before anyone goes on.
  template <class Last>
  void meet(Last&& last) {
    run_last([](void* of) { (*static_cast<Last*>(of))(); }, &last);
  }
  void meet() {
    meet([] {});
  }

 protected:
  ~Team() = default;
  virtual void run_last(void (*last)(void*), void* of) = 0;
};

}  // namespace ckdist
