// The threads that run a step together, seen from one of them.
#pragma once
#include <cstdint>

#include "core/range.h"

namespace ckdist {

class Team {
 public:
  Team(int thread, int threads) : thread(thread), threads(threads) {}
  const int thread, threads;

  // This thread's part of n items.
  Range share(int64_t n) const { return {n * thread / threads, n * (thread + 1) / threads}; }
  // Barrier over all threads. The last to arrive runs `last()` before the others continue.
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
