#include "comm/channel.h"

#include <sched.h>

#include "comm/pulse.h"
#include "comm/stream_transport.h"
#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kSpinNs = 50'000;
constexpr int64_t kSleepNs = 200'000;
constexpr int kMaxContexts = 2000;  // tags up to 2^21: every MPI that is in use allows these
}  // namespace

Channel::Channel(std::shared_ptr<Wire> wire, int context, std::vector<int> ranks, std::vector<int> names, int rank,
                 std::shared_ptr<const Pulse> pulse)
    : rank(rank),
      size(int(ranks.size())),
      wire_(std::move(wire)),
      context_(context),
      ranks_(std::move(ranks)),
      names_(std::move(names)),
      pulse_(std::move(pulse)) {
  if (context >= kMaxContexts)
    fail(Status::config, "%d communicators were made by split; at most %d are possible in one job", context,
         kMaxContexts);
}

Channel::Pending Channel::isend(int peer, int tag, const void* data, int64_t bytes) {
  Turn turn(*wire_);
  wire_->transport->mark = mark_of(tag);
  return {wire_->transport->isend(ranks_[peer], on_wire(tag), data, bytes), peer};
}

Channel::Pending Channel::irecv(int peer, int tag, void* data, int64_t bytes) {
  Turn turn(*wire_);
  wire_->transport->mark = mark_of(tag);
  return {wire_->transport->irecv(ranks_[peer], on_wire(tag), data, bytes), peer};
}

bool Channel::test(Pending& pending) {
  if (!pending.request) return true;
  Turn turn(*wire_);
  if (!wire_->transport->test(pending.request)) return false;
  pending.request = 0;
  return true;
}

void Channel::wait(Pending pending, const char* what) {
  if (test(pending)) return;
  // A slow link is no lost peer: the time counts from the last byte that this rank, or the peer, moved.
  const auto moved = [&] {
    return wire_->transport->moved.load(std::memory_order_relaxed) + pulse_->moved(names_[pending.peer]);
  };
  int64_t start = now_ns();
  uint64_t seen = moved();
  while (!test(pending)) {
    const int64_t now = now_ns();
    if (now - start < kSpinNs) {
      cpu_pause();
      continue;
    }
    if (const uint64_t count = moved(); count != seen) seen = count, start = now - kSpinNs;
    if (now - start > timeout_ns())
      fail(Status::comm, "%s did not answer within %.0f s in %s over %s",
           wire_->transport->who(names_[pending.peer]).c_str(), timeout_ns() / 1e9, what, name());
    pulse_->check(what);
    idle(kSleepNs);
  }
}

void Channel::wait(std::vector<Pending>& pending, const char* what) {
  for (const Pending& p : pending) wait(p, what);
  pending.clear();
}

void Channel::idle(int64_t ns) {
  pulse_->check();
  Turn turn(*wire_);
  wire_->transport->idle(ns);
}

void Channel::abandon(const char* reason) {
  Turn turn(*wire_);
  wire_->transport->abandon(reason);
}

bool Channel::register_memory(void* base, int64_t bytes) {
  Turn turn(*wire_);
  return wire_->transport->register_memory(base, bytes);
}

void Channel::forget_memory(void* base) {
  Turn turn(*wire_);
  wire_->transport->forget_memory(base);
}

void Channel::expose(int window, void* base, int64_t bytes) {
  Turn turn(*wire_);
  wire_->transport->expose(window_on_wire(window), base, bytes);
}

Channel::Pending Channel::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  Turn turn(*wire_);
  return {wire_->transport->iput(ranks_[peer], window_on_wire(window), offset, data, bytes), peer};
}

Channel::Pending Channel::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  Turn turn(*wire_);
  return {wire_->transport->iget(ranks_[peer], window_on_wire(window), offset, data, bytes), peer};
}

Channel::Pending Channel::inotify(int peer, int window, int slot) {
  Turn turn(*wire_);
  return {wire_->transport->inotify(ranks_[peer], window_on_wire(window), slot), peer};
}

uint64_t Channel::notified(int window, int slot) {
  Turn turn(*wire_);
  return wire_->transport->notified(window_on_wire(window), slot);
}

}  // namespace ckdist
