#include "comm/host_ranks.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "comm/pulse.h"
#include "comm/waiting.h"
#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kTickNs = 100'000'000;
constexpr int64_t kPage = 4096;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Process {
  uint64_t start = 0;  // in clock ticks since boot, 0 when it is gone or a zombie: tells a dead peer from a reused pid
  bool stopped = false;
};

Process look_at(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (!file) return {};
  const size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the name may hold anything
  char state = 0;
  unsigned long long start = 0;
  if (!p || std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                        &state, &start) != 2)
    return {};
  return {state == 'Z' || state == 'X' ? 0 : start, state == 'T' || state == 't'};
}

}  // namespace

struct HostRanks::Line {
  Signal arrived;  // barriers this rank has reached
  Signal taken;    // messages this rank has made its own
  std::atomic<int32_t> pid, abandoned;
  std::atomic<uint64_t> start;
  char reason[240];  // written before `abandoned`
};

struct HostRanks::Header {
  Signal message;  // messages published
  int64_t message_ints;
  char data_path[56];
  __extension__ Line lines[];
};

HostRanks::HostRanks(const std::string& path, int index, std::vector<int> ranks, int spins, double timeout_s)
    : index(index),
      size(int(ranks.size())),
      ranks_(std::move(ranks)),
      spins_(spins),
      timeout_ns_(int64_t(timeout_s * 1e9)),
      stopped_since_(ranks_.size()) {
  const int64_t bytes = round_up(sizeof(Header) + size * sizeof(Line), kPage);
  if (index == 0) control_.emplace(bytes);
  else control_.emplace(path, bytes);
  header_ = reinterpret_cast<Header*>(control_->data());
  Line& own = header_->lines[index];
  own.start = look_at(getpid()).start;
  own.pid = getpid();
}

uint8_t* HostRanks::share(int64_t bytes, int64_t mailbox_ints) {
  mailbox_ints_ = mailbox_ints;
  if (index == 0) {
    data_.emplace(bytes);
    std::snprintf(header_->data_path, sizeof header_->data_path, "%s", data_->path().c_str());
  }
  meet(kStart);
  if (index != 0) {
    data_.emplace(header_->data_path, bytes);
    received_.resize(mailbox_ints);
  }
  mailbox_ = reinterpret_cast<int32_t*>(data_->data() + bytes) - mailbox_ints;
  return data_->data();
}

void HostRanks::check_alive(int i, int step) {
  const Line& line = header_->lines[i];
  const int pid = line.pid;
  if (line.abandoned)
    fail(Status::comm, "rank %d (pid %d) gave up at or before %s: %s", ranks_[i], pid, place(step).text, line.reason);
  if (pid && look_at(pid).start != line.start)
    fail(Status::comm, "rank %d (pid %d) died at or before %s", ranks_[i], pid, place(step).text);
}

// For a peer that owes nothing now and therefore has no deadline: it may sleep, but not lie stopped.
void HostRanks::check_awake(int i) {
  const int pid = header_->lines[i].pid;
  if (!pid || !look_at(pid).stopped) {
    stopped_since_[i] = 0;
    return;
  }
  const int64_t now = now_ns();
  if (!stopped_since_[i]) stopped_since_[i] = now;
  if (now - stopped_since_[i] > timeout_ns_)
    fail(Status::comm, "rank %d (pid %d) has been stopped for more than %.0f s between steps", ranks_[i], pid,
         timeout_ns_ / 1e9);
}

void HostRanks::wait_for(Signal& signal, uint32_t count, int i, int step, int64_t grace_ns, Idle idle) {
  std::optional<Waited> waited;  // the clock is not asked before the first sleep
  signal.wait(
      spins_, kTickNs, [&](uint32_t v) { return int32_t(v - count) >= 0; },
      [&] {
        check_alive(i, step);
        if (!waited) waited.emplace();
        if (pulse_) check_pulse(i, step, waited->ns());
        if (waited->ns() <= timeout_ns_ + grace_ns) return;
        if (const int lost = pulse_ ? pulse_->blame(ranks_[i]) : ranks_[i]; lost != ranks_[i])
          fail(Status::comm, "rank %d did not reach %s within %.0f s", lost, place(step).text, timeout_ns_ / 1e9);
        fail(Status::comm, "rank %d (pid %d) did not reach %s within %.0f s", ranks_[i], header_->lines[i].pid.load(),
             place(step).text, timeout_ns_ / 1e9);
      },
      idle);
  if (pulse_ && waited) pulse_->wait_for(-1);
}

// What is known of the whole job while this rank waits for rank i of its host; the others are told so.
void HostRanks::check_pulse(int i, int step, int64_t waited_ns) {
  if (waited_ns > timeout_ns_ / 2) pulse_->wait_for(ranks_[i]);
  if (pulse_->lost()) fail(Status::comm, "%.400s (%s)", pulse_->reason(), at_or_before(step).text);
}

void HostRanks::meet(int step, int64_t grace_ns, Idle idle) {
  const uint32_t epoch = ++epoch_;
  header_->lines[index].arrived.set(epoch);
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    wait_for(header_->lines[i].arrived, epoch, i, step, grace_ns, idle);
  }
}

void HostRanks::publish(const int32_t* message, int64_t ints) {
  if (ints > mailbox_ints_)
    fail(Status::native, "message of %lld ints is larger than the mailbox of %lld", (long long)ints,
         (long long)mailbox_ints_);
  for (int i = 1; i < size; i++) wait_for(header_->lines[i].taken, message_, i, 0);  // the mailbox holds one message
  if (ints) std::memcpy(mailbox_, message, ints * 4);
  header_->message_ints = ints;
  header_->message.set(++message_);
}

const int32_t* HostRanks::receive(int64_t* ints) {
  const uint32_t wanted = ++message_;
  header_->message.wait(
      spins_, 5 * kTickNs, [&](uint32_t v) { return int32_t(v - wanted) >= 0; },
      [&] {
        check_alive(0, 0);
        check_awake(0);
        if (pulse_) check_pulse(0, 0, 0);
      });
  *ints = header_->message_ints;
  std::memcpy(received_.data(), mailbox_, *ints * 4);
  header_->lines[index].taken.set(wanted);
  return received_.data();
}

void HostRanks::check() {
  for (int i = 0; i < size; i++)
    if (i != index) {
      check_alive(i, 0);
      check_awake(i);
    }
}

void HostRanks::abandon(const char* reason) {
  Line& own = header_->lines[index];
  std::snprintf(own.reason, sizeof own.reason, "%s", reason);
  own.abandoned = 1;
  own.arrived.set(epoch_);  // wakes who sleeps on it; they look and give up
  if (index == 0) header_->message.wake();
}

}  // namespace ckdist
