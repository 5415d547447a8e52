#include "comm/mpi_pulse.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

namespace {
constexpr int64_t kPeriodNs = 1'000'000'000;
constexpr int kPolls = 10, kPollUs = 500;
}

MpiPulse::MpiPulse(const MpiCalls& calls, int size, int64_t timeout_ns) : calls_(calls), timeout_ns_(timeout_ns), peers_(size), thread_([this] { run(); }) {}

MpiPulse::~MpiPulse() { stop(); }

void MpiPulse::stop() {
  {
    std::lock_guard<std::mutex> hold(lock_);
    ending_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MpiPulse::run() {
  const auto period = std::chrono::nanoseconds(std::min(kPeriodNs, timeout_ns_ / 5));
  std::unique_lock<std::mutex> hold(lock_);
  while (!ending_) {
    for (size_t r = 1; r < peers_.size(); r++)
      if (answered(int(r))) ask(int(r));
    // An MPI that moves messages only while it is called gets its chance: some milliseconds, or until all have answered.
    for (int poll = 0, left = 1; left && poll < kPolls; poll++) {
      usleep(kPollUs);
      left = 0;
      for (size_t r = 1; r < peers_.size(); r++) left += !answered(int(r));
    }
    wake_.wait_for(hold, period, [&] { return ending_; });
  }
}

void MpiPulse::ask(int r) {
  Peer& p = peers_[r];
  p.asked_ns = now_ns();
  calls_.irecv(&p.room, sizeof p.room, calls_.byte, r, kTagAnswer, calls_.comm, p.answer.handle);
  calls_.isend(&pulse_, sizeof pulse_, calls_.byte, r, kTagMessage, calls_.comm, p.sent.handle);
  p.sending = true;
}

// An MPI error leaves the answer due, which becomes the error of check().
bool MpiPulse::answered(int r) {
  Peer& p = peers_[r];
  bool failed;
  if (!p.asked_ns) return true;
  if (p.sending && p.sent.complete(calls_, &failed)) p.sending = false;
  if (!p.sending && p.answer.complete(calls_, &failed)) p.asked_ns = 0;
  return !p.asked_ns;
}

void MpiPulse::check(int64_t idle_since) const {
  for (size_t r = 1; r < peers_.size(); r++) {
    const int64_t asked = peers_[r].asked_ns;
    if (asked && now_ns() - std::max(asked, idle_since) > timeout_ns_) fail(Status::comm, "rank %zu has not answered for %.0f s between steps: it is dead, stopped or cut off", r, timeout_ns_ / 1e9);
  }
}

void MpiPulse::end() {
  stop();
  const int64_t start = now_ns();
  for (size_t r = 1; r < peers_.size(); r++)
    while (!answered(int(r))) {
      check(start);
      usleep(100);
    }
}

}  // namespace ckdist
