// A rank's persistent threads. The calling thread is thread 0. The other threads are pinned once. Between jobs they
// spin briefly and then sleep in the kernel, so that an idle server uses no CPU.
#pragma once
#include <sched.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cpu_mask.h"
#include "core/futex.h"

namespace ckdist {

// Thrown in the threads of a job after another thread has failed.
struct Aborted : std::exception {};

class Pool {
 public:
  // `cpus`: one per thread, or empty for no pinning. `spins`: polls before a waiting thread sleeps.
  Pool(int threads, std::vector<int> cpus, int spins);
  ~Pool();
  int size() const { return int(workers_.size()) + 1; }

  // Runs job(thread) on threads [0, active) and returns when all have finished. Rethrows the first failure; then the
  // pool cannot be used again.
  void run(int active, const std::function<void(int)>& job);

  // Barrier over the active threads. The last to arrive runs `last()` first. Waiting threads call `idle()` between
  // polls. Throws Aborted once a thread has failed.
  template <class Last, class Idle>
  void barrier(Last&& last, Idle&& idle) {
    const uint32_t generation = generation_.value.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == active_) {
      arrived_.store(0, std::memory_order_relaxed);
      last();
      generation_.set(generation + 1);
    } else {
      generation_.wait(spins_, 50'000'000, [&](uint32_t v) { return v != generation; }, [&] { check(); }, idle);
    }
  }
  template <class Last>
  void barrier(Last&& last) {
    barrier(last, cpu_pause);
  }
  void barrier() {
    barrier([] {});
  }
  // Returns when done() holds. Another active thread must make it true. Throws Aborted once a thread has failed.
  template <class Done>
  void wait_until(Done&& done) const {
    for (int polls = 0; !done(); ++polls) {
      if (polls < spins_) {
        cpu_pause();
        continue;
      }
      check();
      sched_yield();
    }
  }

 private:
  void work(int thread);
  void execute(int thread);
  void pin(int thread);
  void check() const {
    if (failed_.load(std::memory_order_acquire)) throw Aborted();
  }

  std::vector<std::thread> workers_;
  std::vector<int> cpus_;
  int spins_;
  bool pinned_ = false;
  CpuMask before_;  // the CPUs of the caller's thread before it was pinned
  int active_ = 1;
  const std::function<void(int)>* job_ = nullptr;
  Signal job_signal_;  // number of jobs; the top bit stops the workers
  Signal done_;        // workers that have finished the current job
  Signal generation_;  // of the barrier
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<bool> failed_{false};
  std::mutex failure_lock_;
  std::exception_ptr failure_;
};

}  // namespace ckdist
