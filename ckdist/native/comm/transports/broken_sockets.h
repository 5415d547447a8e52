// The numbers of a transport's sockets whose connection broke, for the thread that connects them again.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

namespace ckdist {

class BrokenSockets {
 public:
  static constexpr int kNone = -1, kClosed = -2;

  void add(int number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    numbers_.push_back(number);
    added_.notify_one();
  }
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    added_.notify_all();
  }
  // Waits for a number. Returns kNone after `seconds`, kClosed after close().
  int next(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    added_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return closed_ || !numbers_.empty(); });
    if (closed_) return kClosed;
    if (numbers_.empty()) return kNone;
    const int number = numbers_.front();
    numbers_.pop_front();
    return number;
  }

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<int> numbers_;
  bool closed_ = false;
};

}  // namespace ckdist
