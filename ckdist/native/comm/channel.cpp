#include "comm/channel.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "comm/failure/failure_detector.h"
#include "comm/transports/stream_transport.h"
#include "core/error.h"

namespace ckdist {

namespace {
constexpr int kMaxContexts = 2000;  // gives tags up to 2^21, which every MPI in use allows
}  // namespace

Channel::Channel(std::shared_ptr<Transport> transport, int context, std::vector<int> ranks, std::vector<int> names,
                 int rank, std::shared_ptr<FailureDetector> detector, const Patience& patience)
    : rank(rank),
      size(int(ranks.size())),
      transport_(std::move(transport)),
      context_(context),
      ranks_(std::move(ranks)),
      names_(std::move(names)),
      detector_(std::move(detector)),
      patience_(patience) {
  if (context >= kMaxContexts)
    fail(Status::config, "%d communicators were made by split; at most %d are possible in one job", context,
         kMaxContexts);
}

Channel::Pending Channel::isend(int peer, int tag, const void* data, int64_t bytes) {
  Turn turn(*transport_);
  transport_->mark = mark_of(tag);
  return {transport_->isend(ranks_[peer], transport_tag(tag), data, bytes), peer};
}

Channel::Pending Channel::irecv(int peer, int tag, void* data, int64_t bytes) {
  Turn turn(*transport_);
  transport_->mark = mark_of(tag);
  return {transport_->irecv(ranks_[peer], transport_tag(tag), data, bytes), peer};
}

bool Channel::test(Pending& pending) {
  if (!pending.request) return true;
  Turn turn(*transport_);
  if (!transport_->test(pending.request)) return false;
  pending.request = 0;
  return true;
}

uint64_t Channel::moved(int peer) const {
  return transport_->moved.load(std::memory_order_relaxed) + detector_->moved(detector_->blame(names_[peer]));
}

// Waits in order: `test` makes progress on all of them.
void Channel::wait(Pending* pending, size_t count, const CallName& call) {
  try {
    for (size_t i = 0; i < count; i++)
      if (!test(pending[i])) wait(pending[i], pending + i, count - i, call);
  } catch (const Error& error) {
    if (std::strstr(error.what(), call.text().c_str())) throw;
    fail(error.status(), "%.400s%.60s", error.what(), call.context().c_str());
  }
}

void Channel::wait(Pending& pending, const Pending* all, size_t count, const CallName& call) {
  Waited waited, quiet;
  uint64_t seen = moved(pending.peer);
  bool told = false;
  while (!test(pending)) {
    const int64_t ns = waited.ns();
    if (ns < patience_.spin_ns) {
      cpu_pause();
      continue;
    }
    if (ns < patience_.yield_ns) {
      sched_yield();
      continue;
    }
    if (const uint64_t count = moved(pending.peer); count != seen) seen = count, quiet = {};
    if (quiet.ns() > timeout_ns() / 2 && !told) detector_->wait_for(names_[pending.peer]), told = true;
    if (quiet.ns() > timeout_ns() + peer_grace_ns(timeout_ns())) fail_late(all, count, call);
    idle(patience_.nap_ns, call);
  }
  if (told) detector_->wait_for(-1);
}

// Names every rank that is late, or the rank that a late rank itself waits for.
void Channel::fail_late(const Pending* pending, size_t count, const CallName& call) {
  std::vector<int> named;
  std::string ranks;
  for (size_t i = 0; i < count; i++) {
    Pending message = pending[i];
    const int lost = detector_->blame(names_[message.peer]);
    if (std::find(named.begin(), named.end(), lost) != named.end() || (i && test(message))) continue;
    ranks += (named.empty() ? "" : ", ") + transport_->who(lost);
    named.push_back(lost);
  }
  fail(Status::comm, "%s%.200s did not answer within %.0f s%s", named.size() > 1 ? "one of " : "", ranks.c_str(),
       double(timeout_ns()) / 1e9, call.context().c_str());
}

void Channel::idle(int64_t ns, const CallName& call) {
  detector_->check(call);
  Turn turn(*transport_);
  transport_->idle(ns);
}

void Channel::abandon(const char* reason) {
  Turn turn(*transport_);
  transport_->abandon(reason);
}

bool Channel::register_memory(void* base, int64_t bytes) {
  Turn turn(*transport_);
  return transport_->register_memory(base, bytes);
}

void Channel::forget_memory(void* base) {
  Turn turn(*transport_);
  transport_->forget_memory(base);
}

void Channel::expose(int window, void* base, int64_t bytes) {
  Turn turn(*transport_);
  transport_->expose(transport_window(window), base, bytes);
}

Channel::Pending Channel::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  Turn turn(*transport_);
  return {transport_->iput(ranks_[peer], transport_window(window), offset, data, bytes), peer};
}

Channel::Pending Channel::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  Turn turn(*transport_);
  return {transport_->iget(ranks_[peer], transport_window(window), offset, data, bytes), peer};
}

Channel::Pending Channel::inotify(int peer, int window, int slot) {
  Turn turn(*transport_);
  return {transport_->inotify(ranks_[peer], transport_window(window), slot), peer};
}

uint64_t Channel::notified(int window, int slot) {
  Turn turn(*transport_);
  return transport_->notified(transport_window(window), slot);
}

}  // namespace ckdist
