#include "comm/timing.h"

#include <algorithm>
#include <cstring>

#include "core/futex.h"

namespace ckdist {

double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call) {
  const auto rewrite = [&](int i) {
    std::memset(data, i & 1, size_t(bytes));
    asm volatile("" ::: "memory");
  };
  const auto seconds = [&](bool called) {
    const int64_t start = now_ns();
    for (int i = 0; i < calls; i++) {
      rewrite(i);
      if (called) call();
    }
    return double(now_ns() - start) * 1e-9 / calls;
  };
  for (int i = 0; i < std::min(calls, 20); i++) rewrite(i), call();
  const double both = seconds(true), alone = seconds(false);
  call();  // meet again
  return both - alone;
}

}  // namespace ckdist
