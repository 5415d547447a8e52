// Prefetch instructions where this CPU's hardware prefetching is not enough.
#pragma once
#include <cstdint>

namespace ckdist {

// True on Intel's CPUs, whose cores get up to a third more bandwidth from it: products of any number of tokens prefetch
// their weights with instructions, from near ahead, and products of few tokens read two tiles at once.
extern const bool weights_fetched;
// True on AMD's CPUs from Zen 5 on. Products of one or two tokens prefetch weights of less than 8 bits.
extern const bool codes_fetched;
constexpr int kNear = 2 << 10;  // bytes

// Prefetches cache lines to the L2 cache. Always inlined: compilers would remove a call of a function without other
// effects.
[[gnu::always_inline]] inline void fetch_lines(const uint8_t* at, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 2);
}
// Prefetches to the L1 cache.
[[gnu::always_inline]] inline void fetch_lines_near(const uint8_t* at, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 3);
}
[[gnu::always_inline]] inline void fetch_floats(const float* at, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
}

}  // namespace ckdist
