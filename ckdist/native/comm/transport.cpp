#include "comm/transport.h"

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kSpins = 2000;
constexpr int64_t kSleepNs = 200'000;
}  // namespace

void Transport::wait(Request request, int peer, const char* what) {
  for (int i = 0; i < kSpins; i++) {
    if (test(request)) return;
    cpu_pause();
  }
  const int64_t start = now_ns();
  while (!test(request)) {
    if (now_ns() - start > timeout_ns) fail(Status::comm, "rank %d did not answer within %.0f s in %s over %s", peer, timeout_ns / 1e9, what, name());
    idle(kSleepNs);
  }
}

}  // namespace ckdist
