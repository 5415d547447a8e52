#include "comm/transports/exchange_time.h"

#include <algorithm>
#include <vector>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kTag = 8;
}

double time_exchange(Transport& transport, int peer, int64_t bytes, int calls) {
  if (peer < 0 || peer >= transport.size || peer == transport.rank || bytes < 0 || calls < 1)
    fail(Status::config, "%d exchanges of %lld bytes with rank %d of %d are not possible", calls, (long long)bytes,
         peer, transport.size);
  std::vector<uint8_t> out(size_t(bytes), 1), in(size_t(bytes), 1);
  std::vector<int64_t> times;
  for (int i = 0; i <= calls; i++) {
    const int64_t start = now_ns();
    const Transport::Request arriving = transport.irecv(peer, kTag, in.data(), bytes),
                             leaving = transport.isend(peer, kTag, out.data(), bytes);
    transport.wait(arriving, peer, "a measured exchange");
    transport.wait(leaving, peer, "a measured exchange");
    if (i) times.push_back(now_ns() - start);
  }
  std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
  return double(times[times.size() / 2]) * 1e-9;
}

}  // namespace ckdist
