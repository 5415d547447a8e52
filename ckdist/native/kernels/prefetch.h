// What this CPU's own prefetching leaves to instructions.
#pragma once
#include <cstdint>

namespace ckdist {

// Whether products of any number of tokens fetch their weights by instructions, from near ahead, and those of a few
// tokens read two tiles at once: so on Intel's CPUs, whose cores get up to a third more from memory by it.
extern const bool weights_fetched;
constexpr int kNear = 2 << 10;  // bytes

// Brings cache lines to the L2 cache. Where a function that does nothing else were called, compilers would leave it
// out.
[[gnu::always_inline]] inline void fetch_lines(const uint8_t* at, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 2);
}
// To the L1 cache.
[[gnu::always_inline]] inline void fetch_lines_near(const uint8_t* at, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 3);
}
[[gnu::always_inline]] inline void fetch_floats(const float* at, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
}

}  // namespace ckdist
