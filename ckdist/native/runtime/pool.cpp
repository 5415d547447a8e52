#include "runtime/pool.h"

#include <algorithm>
#include <map>

namespace ckdist {

namespace {
constexpr uint32_t kEnd = 1u << 31;
constexpr int64_t kNeverNs = 1'000'000'000;
}  // namespace

std::vector<int> Pool::groups_of(int threads, const std::vector<int>& caches) {
  std::vector<int> result(threads, 0);
  if (threads <= kFlatThreads) return result;
  std::map<int, int> sizes, before;  // by cache: its threads; its threads that have a group
  const auto cache_of = [&](int thread) { return caches.empty() ? 0 : caches[thread]; };
  for (int t = 0; t < threads; t++) sizes[cache_of(t)]++;
  std::map<std::pair<int, int>, int> numbers;  // by cache and part of it
  for (int t = 0; t < threads; t++) {
    const int cache = cache_of(t), parts = (sizes[cache] + kGroupThreads - 1) / kGroupThreads;
    const std::pair<int, int> part = {cache, before[cache]++ * parts / sizes[cache]};
    result[t] = numbers.emplace(part, int(numbers.size())).first->second;
  }
  return result;
}

Pool::Pool(int threads, std::vector<int> cpus, const std::vector<int>& caches, int spins)
    : cpus_(std::move(cpus)),
      spins_(spins),
      group_of_(groups_of(threads, caches)),
      groups_(size_t(*std::max_element(group_of_.begin(), group_of_.end())) + 1) {
  for (int t = 1; t < threads; t++) working_groups_ += groups_[group_of_[t]].workers++ == 0;
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
  activate(active);
  job_ = &job;
  done_.value.store(0, std::memory_order_relaxed);
  if (active > 1) job_signal_.set((job_signal_.value.load(std::memory_order_relaxed) + 1) & ~kEnd);
  execute(0);
  // Workers from `active` on are in no barrier, but they report too: the job must not be replaced while they read it.
  if (active > 1) done_.wait(spins_, kNeverNs, [&](uint32_t v) { return v == working_groups_; }, [] {});
  if (failure_) std::rethrow_exception(failure_);
}

void Pool::activate(int threads) {
  if (threads == active_) return;
  active_ = threads;
  for (Group& group : groups_) group.active = 0;
  for (int t = 0; t < threads; t++) groups_[group_of_[t]].active++;
  active_groups_ = 0;
  for (int before = 0; before < threads; before += groups_[active_groups_++].active)
    groups_[active_groups_].before = before;
}

void Pool::release(uint32_t generation) {
  for (int g = 0; g < active_groups_; g++) groups_[g].generation.value.store(generation, std::memory_order_release);
  // Ordered before the reads of `sleepers`, or a sleeper could be missed. One fence lets the stores overlap.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int g = 0; g < active_groups_; g++) groups_[g].generation.wake();
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
  Group& own = groups_[group_of_[thread]];
  uint32_t seen = 0;
  for (;;) {
    job_signal_.wait(spins_, kNeverNs, [&](uint32_t v) { return v != seen; }, [] {});
    const uint32_t value = job_signal_.value.load(std::memory_order_acquire);
    if (value & kEnd) return;
    seen = value;
    if (thread < active_) execute(thread);
    if (own.finished.fetch_add(1, std::memory_order_acq_rel) + 1 < own.workers) continue;
    own.finished.store(0, std::memory_order_relaxed);
    done_.add(1);
  }
}

}  // namespace ckdist
