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
  // If one rank starts an exchange later than the other, it finds the other's message there already: it takes no time,
  // and the other one's exchange takes twice as long. In the next one it is the other way round. So pairs are compared.
  int64_t least = INT64_MAX, before = 0;
  for (int i = 0; i <= calls; i++) {
    const int64_t start = now_ns();
    const Transport::Request arriving = transport.irecv(peer, kTag, in.data(), bytes),
                             leaving = transport.isend(peer, kTag, out.data(), bytes);
    transport.wait(arriving, peer, "a measured exchange");
    transport.wait(leaving, peer, "a measured exchange");
    const int64_t took = now_ns() - start;
    if (i) least = std::min(least, (before + took) / 2);
    before = took;
  }
  return double(least) * 1e-9;
}

}  // namespace ckdist
