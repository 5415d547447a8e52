#include "core/export.h"

#include "api/machine.h"

#include <algorithm>
#include <cstring>

#include "core/arena.h"
#include "core/error.h"
#include "core/futex.h"
#include "kernels/kernels.h"
#include "runtime/pool.h"

using namespace ckdist;

extern "C" int ckdist_read_bandwidth(int32_t threads, const int32_t* cpus, int64_t bytes_each, int32_t repeats, double* out) {
  return guard([&] {
    if (threads < 1 || bytes_each < 512) fail(Status::config, "%d threads and %lld bytes each: at least 1 and 512 are needed", threads, (long long)bytes_each);
    bytes_each = bytes_each / 512 * 512;
    Arena memory(threads * bytes_each, "the bandwidth measurement");
    Pool pool(threads, cpus ? std::vector<int>(cpus, cpus + threads) : std::vector<int>(), 10000);
    pool.run(threads, [&](int t) { std::memset(memory.data() + t * bytes_each, t + 1, bytes_each); });
    double best = 0;
    volatile uint64_t sink = 0;
    for (int i = 0; i < repeats; i++) {
      const int64_t start = now_ns();
      pool.run(threads, [&](int t) { sink = kernels().machine.read(memory.data() + t * bytes_each, bytes_each); });
      best = std::max(best, threads * bytes_each / (double(now_ns() - start) * 1e-9));
    }
    (void)sink;
    *out = best;
  });
}
