#include "comm/timing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kExchangeTag = 8;
}

double time_on_fresh_data(void* data, int64_t bytes, int calls, const std::function<void()>& call) {
  constexpr int64_t kPiece = 2048;
  alignas(64) uint8_t ones[2][kPiece];
  for (int i = 0; i < 2; i++) std::memset(ones[i], 0x3f, sizeof ones[i]), ones[i][0] = uint8_t(i);
  const auto rewrite = [&](int i) {
    // Piece by piece with vector stores, as kernels write: memset may bypass the caches.
    for (int64_t k = 0; k < bytes; k += kPiece)
      std::memcpy(static_cast<uint8_t*>(data) + k, ones[i & 1], size_t(std::min(kPiece, bytes - k)));
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
  call();  // synchronizes the ranks again
  return both - alone;
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
    const Transport::Request arriving = transport.irecv(peer, kExchangeTag, in.data(), bytes),
                             leaving = transport.isend(peer, kExchangeTag, out.data(), bytes);
    transport.wait(arriving, peer, "a measured exchange");
    transport.wait(leaving, peer, "a measured exchange");
    const int64_t took = now_ns() - start;
    if (i) least = std::min(least, (before + took) / 2);
    before = took;
  }
  return double(least) * 1e-9;
}

}  // namespace ckdist
