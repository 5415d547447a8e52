// A rank's threads: all run, meet in barriers in the same order, and end with the first failure.
#include <atomic>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/pool.h"

using namespace ckdist;

TEST_CASE("every active thread runs the job once, and nobody else") {
  for (const int threads : {1, 2, 5}) {
    Pool pool(threads, {}, 10);
    for (int active = 1; active <= threads; active++) {
      std::vector<std::atomic<int>> ran(threads);
      pool.run(active, [&](int thread) { ran[thread]++; });
      for (int t = 0; t < threads; t++) CHECK(ran[t] == (t < active));
    }
  }
}

TEST_CASE("the last to arrive runs alone before anyone goes on") {
  Pool pool(4, {}, 10);
  std::atomic<int> before{0};
  int met = 0;
  bool complete = true;
  pool.run(4, [&](int) {
    for (int round = 1; round <= 500; round++) {
      before++;
      pool.barrier([&] {
        complete = complete && before == 4 * round;
        met++;
      });
      if (met != round) complete = false;
      pool.barrier();
    }
  });
  CHECK(complete);
  CHECK(met == 500);
}

TEST_CASE("a failure ends those who wait, and is thrown again") {
  Pool pool(3, {}, 10);
  CHECK_THROWS_WITH(pool.run(3,
                             [&](int thread) {
                               if (thread == 1) throw std::runtime_error("this one fails");
                               pool.barrier();
                             }),
                    "this one fails");
}
