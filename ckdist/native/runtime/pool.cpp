#include "runtime/pool.h"

namespace ckdist {

namespace {
constexpr uint32_t kEnd = 1u << 31;
constexpr int64_t kNeverNs = 1'000'000'000;
}  // namespace

Pool::Pool(int threads, std::vector<int> cpus, int spins) : cpus_(std::move(cpus)), spins_(spins) {
  for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
  job_signal_.set(job_signal_.value.load(std::memory_order_relaxed) | kEnd);
  for (std::thread& worker : workers_) worker.join();
  if (pinned_) before_.apply();  // restores the CPUs of the caller's thread
}

void Pool::pin(int thread) {
  if (size_t(thread) >= cpus_.size()) return;
  CpuMask own;
  own.add(cpus_[thread]);
  own.apply();  // if it fails, the thread stays on the launcher's CPUs
}

void Pool::run(int active, const std::function<void(int)>& job) {
  if (failure_) std::rethrow_exception(failure_);
  if (!pinned_ && !cpus_.empty()) {
    pinned_ = before_.read();
    pin(0);
  }
  active_ = active;
  job_ = &job;
  done_.value.store(0, std::memory_order_relaxed);
  if (active > 1) job_signal_.set((job_signal_.value.load(std::memory_order_relaxed) + 1) & ~kEnd);
  execute(0);
  // Workers from `active` on are in no barrier, but they report too: the job must not be replaced while they read it.
  if (active > 1) done_.wait(spins_, kNeverNs, [&](uint32_t v) { return v == workers_.size(); }, [] {});
  if (failure_) std::rethrow_exception(failure_);
}

void Pool::execute(int thread) {
  try {
    (*job_)(thread);
  } catch (const Aborted&) {
  } catch (...) {
    std::lock_guard<std::mutex> hold(failure_lock_);
    if (!failure_) failure_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
  }
}

void Pool::work(int thread) {
  pin(thread);
  uint32_t seen = 0;
  for (;;) {
    job_signal_.wait(spins_, kNeverNs, [&](uint32_t v) { return v != seen; }, [] {});
    const uint32_t value = job_signal_.value.load(std::memory_order_acquire);
    if (value & kEnd) return;
    seen = value;
    if (thread < active_) execute(thread);
    done_.add(1);
  }
}

}  // namespace ckdist
