// Copies blocks of caches to and from slabs while steps run, on a thread of its own.
//
// The worker's thread begins copies and waits for them. The copier's thread alone touches the blocks in between: a step
// that needs them has waited before.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "api/commands_api.h"
#include "core/cpu_mask.h"
#include "core/trace.h"

namespace ckdist {

class Inference;

class BlockCopier {
 public:
  explicit BlockCopier(int64_t timeout_ns);  // longest wait for one block
  ~BlockCopier();                            // finishes the copies

  struct Copy {
    Inference* model;
    bool into_cache;
    std::vector<ckdist_block_copy> blocks;
  };
  void begin(Copy copy);
  // Returns when `count` copies have ended since the start. Costs one load if they have. Fails if the disk does not
  // answer.
  void wait(uint32_t count) {
    if (int32_t(done_.load(std::memory_order_acquire) - count) < 0) sleep_until(count);
  }
  bool is_stuck() const { return is_stuck_; }  // a wait has failed: the thread cannot be joined
  ckdist_copy_results results();
  void trace(Trace& trace) { lane_ = trace.lane("block copies"); }

 private:
  void work();
  ckdist_copy_result run(const Copy& copy);
  void sleep_until(uint32_t count);

  const int64_t timeout_ns_;
  bool is_stuck_ = false;
  TraceLane* lane_ = nullptr;
  CpuMask cpus_;                   // the CPUs of the rank, not the one that the pool pins its first thread to
  // Ended copies, and blocks. Written by the copier's thread.
  std::atomic<uint32_t> done_{0}, blocks_{0};
  std::mutex mutex_;               // protects the members below
  std::condition_variable changed_;
  std::deque<Copy> queue_;
  ckdist_copy_results results_{};
  bool ends_ = false;
  std::thread thread_;  // from the first copy on
};

}  // namespace ckdist
