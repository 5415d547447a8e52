#include "comm/transports/exchange_time.h"

#include <algorithm>
#include <cstdint>
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
  int64_t least = INT64_MAX;
  for (int i = 0; i <= calls; i++) {
    const int64_t start = now_ns();
    const Transport::Request arriving = transport.irecv(peer, kTag, in.data(), bytes),
                             leaving = transport.isend(peer, kTag, out.data(), bytes);
    transport.wait(arriving, peer, "a measured exchange");
    transport.wait(leaving, peer, "a measured exchange");
    if (i) least = std::min(least, now_ns() - start);
  }
  return double(least) * 1e-9;
}

}  // namespace ckdist
