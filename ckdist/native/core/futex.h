// Waiting for a 32-bit word to change: spin a little, then sleep in the kernel. Works across processes on shared
// memory.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ckdist {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Called between two polls of a waiting thread.
struct Idle {
  void (*call)(void*) = [](void*) { cpu_pause(); };
  void* with = nullptr;
  void operator()() const { call(with); }
};

// A word that some threads change and others wait for.
struct SignalWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void set(uint32_t v) {
    value.store(v, std::memory_order_seq_cst);  // ordered before the read of `sleepers`, or a sleeper could be missed
    wake();
  }
  void add(uint32_t n) {
    value.fetch_add(n, std::memory_order_seq_cst);
    wake();
  }
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps while the value is `seen`, at most `ns`; may return early.
  void sleep_while(uint32_t seen, int64_t ns) {
    timespec timeout{ns / 1000000000, ns % 1000000000};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (value.load(std::memory_order_seq_cst) == seen)
      syscall(SYS_futex, &value, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  // Waits until `done(value)`. Polls `spins` times before it sleeps. Calls `idle()` between polls, and `tick()` after
  // every sleep of at most `tick_ns`. `tick()` may throw to stop waiting.
  template <class Done, class Tick, class Idle>
  void wait(int spins, int64_t tick_ns, Done&& done, Tick&& tick, Idle&& idle) {
    for (int i = 0; i < spins; i++) {
      if (done(value.load(std::memory_order_acquire))) return;
      idle();
    }
    for (;;) {
      const uint32_t seen = value.load(std::memory_order_acquire);
      if (done(seen)) return;
      sleep_while(seen, tick_ns);
      if (done(value.load(std::memory_order_acquire))) return;
      tick();
    }
  }
  template <class Done, class Tick>
  void wait(int spins, int64_t tick_ns, Done&& done, Tick&& tick) {
    wait(spins, tick_ns, done, tick, cpu_pause);
  }
};

// One with its own cache line.
struct alignas(64) Signal : SignalWord {};
static_assert(sizeof(Signal) == 64, "a signal fills its cache line");

}  // namespace ckdist
