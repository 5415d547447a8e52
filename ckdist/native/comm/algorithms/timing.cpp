#include "comm/algorithms/timing.h"

#include <algorithm>
#include <cstring>

#include "core/futex.h"

namespace ckdist {

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

}  // namespace ckdist
