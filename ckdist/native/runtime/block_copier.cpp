#include "runtime/block_copier.h"

#include <chrono>

#include "comm/failure/waiting.h"
#include "core/error.h"
#include "runtime/inference.h"

namespace ckdist {

namespace {
constexpr std::chrono::milliseconds kLook{100};  // between two looks at the progress of a copy
}

BlockCopier::BlockCopier(int64_t timeout_ns) : timeout_ns_(timeout_ns) { cpus_.read(); }

BlockCopier::~BlockCopier() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void BlockCopier::begin(Copy copy) {
  std::lock_guard<std::mutex> hold(mutex_);
  queue_.push_back(std::move(copy));
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void BlockCopier::sleep_until(uint32_t count) {
  std::unique_lock<std::mutex> hold(mutex_);
  Waited quiet;
  for (uint32_t seen = blocks_;
       !changed_.wait_for(hold, kLook, [&] { return int32_t(done_.load(std::memory_order_acquire) - count) >= 0; });) {
    if (blocks_ != seen) seen = blocks_, quiet = {};
    if (quiet.ns() < timeout_ns_) continue;
    is_stuck_ = true;
    fail(Status::native, "--cache-disk: no block was read or written within %.0f s: the disk does not answer",
         double(timeout_ns_) / 1e9);
  }
}

ckdist_copy_results BlockCopier::results() {
  std::lock_guard<std::mutex> hold(mutex_);
  return results_;
}

ckdist_copy_result BlockCopier::run(const Copy& copy) {
  ckdist_copy_result result{};
  const int64_t begin = now_ns();
  if (copy.into_cache)
    for (const ckdist_block_copy& block : copy.blocks) copy.model->slab(block.entry.kind)->read_ahead(block.slot);
  for (const ckdist_block_copy& block : copy.blocks) {
    result.error = copy.model->copy_block(block, copy.into_cache);
    if (result.error != 0) break;
    result.good++;
    blocks_++;
  }
  result.nanoseconds = now_ns() - begin;
  return result;
}

void BlockCopier::work() {
  cpus_.apply();  // if it fails, the thread shares the first thread's CPU
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [&] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Copy copy = std::move(queue_.front());
    queue_.pop_front();
    hold.unlock();
    const int64_t begin = now_ns();
    const ckdist_copy_result result = run(copy);
    if (lane_) lane_->add(ckdist_trace_copy_blocks, begin, now_ns(), int32_t(copy.blocks.size()), copy.into_cache);
    hold.lock();
    results_.results[++results_.ended % ckdist_results_kept] = result;
    done_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
  }
}

}  // namespace ckdist
