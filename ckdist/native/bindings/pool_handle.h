#pragma once
#include <memory>

#include "runtime/pool.h"

// The CPUs or caches of threads; empty if there are none.
inline std::vector<int> of_threads(const int32_t* numbers, int threads) {
  return numbers ? std::vector<int>(numbers, numbers + threads) : std::vector<int>();
}

struct ckdist_pool {
  std::shared_ptr<ckdist::Pool> pool;
};
