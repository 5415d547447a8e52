#include "comm/transports/transport.h"

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kSpins = 2000;
constexpr int64_t kSleepNs = 200'000;
}  // namespace

std::string Transport::who(int peer) const {
  const std::string rank = "rank " + std::to_string(peer);
  return size_t(peer) < hosts.size() ? rank + " (on " + hosts[peer] + ")" : rank;
}

void Transport::check_slot(int slot) {
  if (slot < 0 || slot >= kWindowSlots)
    fail(Status::config, "%d is not a slot of a window; use 0 to %d", slot, kWindowSlots - 1);
}

std::string Transport::mismatch(int64_t sent, uint32_t sent_mark, int64_t bytes, uint32_t mark) {
  if (sent != bytes) return "sent " + std::to_string(sent) + " bytes where " + std::to_string(bytes) + " were expected";
  if (sent_mark != mark)
    return "called another collective, or another dtype or operation, than this rank: all ranks must make the same "
           "calls in the same order";
  return "";
}

void Transport::wait(Request request, int peer, const char* what) {
  for (int i = 0; i < kSpins; i++) {
    if (test(request)) return;
    cpu_pause();
  }
  const int64_t start = now_ns();
  while (!test(request)) {
    if (now_ns() - start > timeout_ns)
      fail(Status::comm, "%s did not answer within %.0f s in %s over %s", who(peer).c_str(), timeout_ns / 1e9, what,
           name());
    idle(kSleepNs);
  }
}

}  // namespace ckdist
