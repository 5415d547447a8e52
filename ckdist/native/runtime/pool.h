// A rank's persistent threads. The calling thread is thread 0. The other threads are pinned once. Between jobs they
// spin briefly and then sleep in the kernel, so that an idle server uses no CPU.
//
// Threads that share a last-level cache form a group. In a barrier they count in the group's cache line, and poll
// another line of the group. Only the last thread of each group touches a line of all groups. The end of a job is
// counted in the same way.
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
  // `cpus`: one per thread, or empty for no pinning. `caches`: the last-level cache of each thread, or empty if it is
  // not known. `spins`: polls before a waiting thread sleeps.
  Pool(int threads, std::vector<int> cpus, const std::vector<int>& caches, int spins);
  ~Pool();
  int size() const { return int(workers_.size()) + 1; }

  // The group of each thread, ascending by their first threads. At most kFlatThreads threads are one group. The threads
  // of a larger cache form several groups of at most kGroupThreads.
  static std::vector<int> groups_of(int threads, const std::vector<int>& caches);
  static constexpr int kFlatThreads = 8, kGroupThreads = 8;

  // Runs job(thread) on threads [0, active) and returns when all have finished. Rethrows the first failure; then the
  // pool cannot be used again.
  void run(int active, const std::function<void(int)>& job);

  // Sets the number of active threads before run(), for share_begin(). Not while a job runs.
  void activate(int threads);
  // The groups of the active threads, and the group of an active thread. share_begin: the first of the items of a group
  // if `items` items are divided evenly over the active threads.
  int groups() const { return active_groups_; }
  int group_of(int thread) const { return group_of_[thread]; }
  int64_t share_begin(int group, int64_t items) const {
    return group == active_groups_ ? items : items * groups_[group].before / active_;
  }

  // Barrier over the active threads. The last to arrive runs `last()` first. Waiting threads call `idle()` between
  // polls. Throws Aborted once a thread has failed.
  template <class Last, class Idle = void()>
  void barrier(int thread, Last&& last, Idle&& idle = cpu_pause) {
    Group& own = groups_[group_of_[thread]];
    const uint32_t generation = own.generation.value.load(std::memory_order_relaxed);
    if (own.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == own.active) {
      own.arrived.store(0, std::memory_order_relaxed);
      if (active_groups_ == 1) {
        last();
        return own.generation.set(generation + 1);
      }
      if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == active_groups_) {
        arrived_.store(0, std::memory_order_relaxed);
        last();
        return release(generation + 1);
      }
    }
    own.generation.wait(spins_, 50'000'000, [&](uint32_t v) { return v != generation; }, [&] { check(); }, idle);
  }
  void barrier(int thread) {
    barrier(thread, [] {});
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
  void release(uint32_t generation);
  void check() const {
    if (failed_.load(std::memory_order_acquire)) throw Aborted();
  }

  struct Group {
    alignas(64) std::atomic<int> arrived{0};  // of the group's active threads
    std::atomic<int> finished{0};             // of the group's workers: they have finished the current job
    int active = 0, before = 0;               // active threads of the group, and of those before it
    int workers = 0;                          // threads of the group without the caller's
    Signal generation;                        // of the barrier
  };

  std::vector<std::thread> workers_;
  std::vector<int> cpus_;
  int spins_;
  bool pinned_ = false;
  CpuMask before_;                   // the CPUs of the caller's thread before it was pinned
  const std::vector<int> group_of_;  // by thread
  std::vector<Group> groups_;
  int active_ = 0, active_groups_ = 0;  // the first groups are active
  const std::function<void(int)>* job_ = nullptr;
  Signal job_signal_;                        // number of jobs; the top bit stops the workers
  Signal done_;                              // groups whose workers have finished the current job
  uint32_t working_groups_ = 0;              // groups with workers
  alignas(64) std::atomic<int> arrived_{0};  // groups whose active threads have all arrived
  alignas(64) std::atomic<bool> failed_{false};
  std::mutex failure_lock_;
  std::exception_ptr failure_;
};

}  // namespace ckdist
