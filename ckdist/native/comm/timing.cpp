#include "comm/timing.h"

#include <algorithm>

#include "core/futex.h"

namespace ckdist {

double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call) {
  const auto rewrite = [&](int i) {
    // By ordinary stores, as kernels write: memset may pass the caches by.
    const uint64_t value = 0x3f803f803f803f80u + uint64_t(i & 1);
    uint64_t* const words = static_cast<uint64_t*>(data);
    for (int64_t k = 0; k < bytes / 8; k++) words[k] = value;
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
