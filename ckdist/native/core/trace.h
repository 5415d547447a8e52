// Records the times of the work of a rank's threads. Each thread has a lane: a ring of events that is allocated in
// advance, so that an event costs four stores. A thread without tracing has no lane and only tests for one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/trace_api.h"

namespace ckdist {

// One thread writes it. Other threads may read it at the same time.
class TraceLane {
 public:
  TraceLane(std::string name, int64_t events) : name(std::move(name)), size_(events), ring_(new Event[events]()) {}
  const std::string name;

  // `begin` and `end` are times of now_ns().
  void add(int32_t kind, int64_t begin, int64_t end, int32_t first = 0, int32_t second = 0, int32_t third = 0) {
    const int64_t count = count_.load(std::memory_order_relaxed);
    Event& e = ring_[next_];
    next_ = next_ + 1 == size_ ? 0 : next_ + 1;
    begun_.store(count + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(
        std::memory_order_release);  // a reader that sees this event's words also sees that the old event is gone
    e[0].store(begin, std::memory_order_relaxed);
    e[1].store(end, std::memory_order_relaxed);
    e[2].store(pair(kind, first), std::memory_order_relaxed);
    e[3].store(pair(second, third), std::memory_order_relaxed);
    count_.store(count + 1, std::memory_order_release);
  }
  // Copies the newest events, oldest first, to out[events]. Returns their number. `dropped`: number of earlier events.
  int64_t read(ckdist_trace_event* out, int64_t* dropped) const {
    const int64_t end = count_.load(std::memory_order_acquire), begin = end > size_ ? end - size_ : 0;
    for (int64_t i = begin; i < end; i++) {
      const Event& e = ring_[i % size_];
      const int64_t last[2] = {e[2].load(std::memory_order_relaxed), e[3].load(std::memory_order_relaxed)};
      out[i - begin] = {e[0].load(std::memory_order_relaxed),
                        e[1].load(std::memory_order_relaxed),
                        int32_t(last[0] >> 32),
                        {int32_t(last[0]), int32_t(last[1] >> 32), int32_t(last[1])}};
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    const int64_t whole =
        begun_.load(std::memory_order_relaxed) - size_;  // older events may have been overwritten since
    *dropped = whole > begin ? std::min(whole, end) : begin;
    if (*dropped > begin) std::copy(out + (*dropped - begin), out + (end - begin), out);
    return end - *dropped;
  }

 private:
  using Event = std::atomic<int64_t>[4];
  static int64_t pair(int32_t high, int32_t low) { return int64_t(uint64_t(uint32_t(high)) << 32 | uint32_t(low)); }

  const int64_t size_;
  int64_t next_ = 0;
  std::unique_ptr<Event[]> ring_;             // zeroed, so its pages are allocated
  std::atomic<int64_t> count_{0}, begun_{0};  // complete events, and events that were started
};

class Trace {
 public:
  explicit Trace(int64_t events) : events_(events) {}
  // A new lane for the calling thread; it lives as long as the trace.
  TraceLane* lane(const std::string& name) {
    std::lock_guard<std::mutex> hold(lock_);
    lanes_.push_back(std::make_unique<TraceLane>(name, events_));
    return lanes_.back().get();
  }
  int lanes() const {
    std::lock_guard<std::mutex> hold(lock_);
    return int(lanes_.size());
  }
  const TraceLane& operator[](int lane) const {
    std::lock_guard<std::mutex> hold(lock_);
    return *lanes_.at(lane);
  }

 private:
  const int64_t events_;
  mutable std::mutex lock_;
  std::vector<std::unique_ptr<TraceLane>> lanes_;
};

}  // namespace ckdist
