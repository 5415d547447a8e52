// A rank's threads: all run, meet in barriers in the same order, and end with the first failure.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/pool.h"

using namespace ckdist;

namespace {

// The cache of each thread, if `each` threads share one.
std::vector<int> caches_of(int threads, int each) {
  std::vector<int> caches(threads);
  for (int t = 0; t < threads; t++) caches[t] = t / each * each;
  return caches;
}

// A model of one barrier: each line's writers and readers in the order of Pool::barrier. A transfer is an access of a
// line that another cache wrote last. The end of a job has the same writers.
struct Lines {
  int transfers = 0;  // between caches
  int chain = 0;      // most threads that change one line, each after the other
  int readers = 0;    // most threads that poll one line

  Lines(const std::vector<int>& groups, const std::vector<int>& caches) {
    const int count = *std::max_element(groups.begin(), groups.end()) + 1;
    std::vector<int> size(count), owner(count, -1);
    int root = -1, last = 0;
    const auto access = [&](int& line, int thread) {
      transfers += line != -1 && line != caches[thread];
      line = caches[thread];
    };
    for (int t = 0; t < int(groups.size()); t++) {
      access(owner[groups[t]], t), size[groups[t]]++;
      chain = std::max(chain, size[groups[t]]);
    }
    std::vector<int> leader(count);
    for (int t = 0; t < int(groups.size()); t++) leader[groups[t]] = t;
    for (int g = 0; g < count && count > 1; g++) access(root, leader[g]);
    chain = std::max(chain, count);
    last = leader[count - 1];
    for (int g = 0; g < count; g++) {
      std::vector<int> readers_of_cache;
      for (int t = 0; t < int(groups.size()); t++)
        if (groups[t] == g) readers_of_cache.push_back(caches[t]);
      readers = std::max(readers, int(readers_of_cache.size()) - 1);
      std::sort(readers_of_cache.begin(), readers_of_cache.end());
      readers_of_cache.erase(std::unique(readers_of_cache.begin(), readers_of_cache.end()), readers_of_cache.end());
      for (const int cache : readers_of_cache) transfers += cache != caches[last];
    }
  }
};

}  // namespace

TEST_CASE("every active thread runs the job once, and nobody else") {
  for (const int threads : {1, 2, 5, 30}) {
    Pool pool(threads, {}, caches_of(threads, 12), 10);
    for (int active = 1; active <= threads; active++) {
      std::vector<std::atomic<int>> ran(threads);
      pool.run(active, [&](int thread) { ran[thread]++; });
      for (int t = 0; t < threads; t++) CHECK(ran[t] == (t < active));
    }
  }
}

TEST_CASE("the last to arrive runs alone before anyone goes on") {
  for (const int active : {4, 9, 40, 33}) {  // several groups from kFlatThreads on; some of them inactive
    Pool pool(40, {}, caches_of(40, 12), 10);
    std::atomic<int> before{0};
    int met = 0;
    std::atomic<bool> complete{true};
    pool.run(active, [&](int thread) {
      for (int round = 1; round <= 50; round++) {
        before++;
        pool.barrier(thread, [&] {
          if (before != active * round) complete = false;
          met++;
        });
        if (met != round) complete = false;
        pool.barrier(thread);
      }
    });
    CHECK(complete);
    CHECK(met == 50);
  }
}

TEST_CASE("a failure ends those who wait, and is thrown again") {
  Pool pool(3, {}, {}, 10);
  CHECK_THROWS_WITH(pool.run(3,
                             [&](int thread) {
                               if (thread == 1) throw std::runtime_error("this one fails");
                               pool.barrier(thread);
                             }),
                    "this one fails");
}

TEST_CASE("threads of one cache form groups, and few threads one group") {
  CHECK(Pool::groups_of(8, caches_of(8, 2)) == std::vector<int>(8, 0));
  CHECK(Pool::groups_of(16, {}) == std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
  CHECK(Pool::groups_of(10, {5, 5, 1, 1, 5, 1, 7, 7, 7, 5}) == std::vector<int>{0, 0, 1, 1, 0, 1, 2, 2, 2, 0});
  for (const int threads : {9, 43, 192, 384})
    for (const int each : {2, 8, 16, 43, 384}) {
      const std::vector<int> caches = caches_of(threads, each), groups = Pool::groups_of(threads, caches);
      std::vector<int> size(threads), cache(threads, -1);
      for (int t = 0; t < threads; t++) {
        CHECK(++size[groups[t]] <= Pool::kGroupThreads);
        if (cache[groups[t]] != -1) CHECK(cache[groups[t]] == caches[t]);
        cache[groups[t]] = caches[t];
      }
    }
}

TEST_CASE("a barrier of groups moves few lines between caches, and no line is changed by many threads in turn") {
  for (const int threads : {16, 48, 96, 192, 384}) {
    const std::vector<int> caches = caches_of(threads, 8);
    std::vector<int> mixed(threads);  // threads arrive in any order: in the flat barrier, of another cache each time
    for (int t = 0; t < threads; t++) mixed[t] = t % (threads / 8);
    const Lines flat(std::vector<int>(threads, 0), mixed), grouped(Pool::groups_of(threads, mixed), mixed);
    CAPTURE(threads);
    CAPTURE(flat.transfers);
    CAPTURE(grouped.transfers);
    CHECK(flat.chain == threads);
    CHECK(flat.readers == threads - 1);
    CHECK(grouped.chain == std::max(8, threads / 8));
    CHECK(grouped.readers == 7);
    CHECK(grouped.transfers == 2 * (threads / 8 - 1));
    CHECK(flat.transfers == threads - 1 + threads / 8 - 1);
  }
}

TEST_CASE("many more threads than CPUs pass barriers and sleep between them") {
  Pool pool(384, {}, caches_of(384, 16), 10);
  std::atomic<int> sum{0};
  for (int job = 0; job < 3; job++)
    pool.run(384, [&](int thread) {
      for (int round = 0; round < 3; round++) {
        sum++;
        pool.barrier(thread);
      }
    });
  CHECK(sum == 384 * 9);
}
