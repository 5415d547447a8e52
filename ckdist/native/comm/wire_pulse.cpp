#include "comm/wire_pulse.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kPeriodNs = 1'000'000'000;
constexpr int kPolls = 10, kPollUs = 500;
}  // namespace

WirePulse::WirePulse(Transport& transport, std::vector<int> peers, int64_t timeout_ns) : transport_(transport), timeout_ns_(timeout_ns) {
  for (const int rank : peers) peers_.push_back({rank});
  thread_ = std::thread([this] { run(); });
}

WirePulse::~WirePulse() { stop(); }

void WirePulse::stop() {
  {
    std::lock_guard<std::mutex> hold(lock_);
    ending_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void WirePulse::pause() {
  std::lock_guard<std::mutex> hold(lock_);
  paused_ = true;
}

void WirePulse::resume() {
  std::lock_guard<std::mutex> hold(lock_);
  paused_ = false;
}

void WirePulse::run() {
  const auto period = std::chrono::nanoseconds(std::min(kPeriodNs, timeout_ns_ / 5));
  std::unique_lock<std::mutex> hold(lock_);
  while (!ending_) {
    try {
      if (!paused_ && unanswered() < int(peers_.size()))
        for (Peer& peer : peers_)
          if (!peer.asked_ns) ask(peer);
      // A wire that moves messages only while it is called gets its chance: some milliseconds, or until all have answered.
      for (int poll = 0; poll < kPolls && !ending_ && !paused_ && unanswered(); poll++) {
        hold.unlock();
        usleep(kPollUs);
        hold.lock();
      }
    } catch (const Error& error) {
      failure_ = error.what();
      return;
    }
    wake_.wait_for(hold, period, [&] { return ending_; });
  }
}

void WirePulse::ask(Peer& peer) {
  peer.asked_ns = now_ns();
  peer.answer = transport_.irecv(peer.rank, kTagAnswer, &peer.room, sizeof peer.room);
  peer.sent = transport_.isend(peer.rank, kTagFrame, frame_, sizeof frame_);
}

int WirePulse::unanswered() {
  int count = 0;
  for (Peer& peer : peers_) {
    if (!peer.asked_ns) continue;
    if (peer.sent && transport_.test(peer.sent)) peer.sent = 0;
    if (!peer.sent && peer.answer && transport_.test(peer.answer)) peer.answer = 0;
    if (!peer.sent && !peer.answer) peer.asked_ns = 0;
    count += peer.asked_ns != 0;
  }
  return count;
}

void WirePulse::check(int64_t idle_since) {
  std::lock_guard<std::mutex> hold(lock_);
  if (!failure_.empty()) fail(Status::comm, "%s (between steps)", failure_.c_str());
  for (const Peer& peer : peers_)
    if (peer.asked_ns && now_ns() - std::max(peer.asked_ns, idle_since) > timeout_ns_)
      fail(Status::comm, "rank %d has not answered for %.0f s between steps: it is dead, stopped or cut off", peer.rank, timeout_ns_ / 1e9);
}

void WirePulse::end() {
  stop();
  const int64_t start = now_ns();
  check(start);
  while (unanswered()) {
    check(start);
    transport_.idle(1'000'000);
  }
}

}  // namespace ckdist
