#include "comm/host_group.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

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
  if (!p || std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &start) != 2) return {};
  return {state == 'Z' || state == 'X' ? 0 : start, state == 'T' || state == 't'};
}

}  // namespace

struct HostGroup::Line {
  Signal arrived;  // exchanges this rank has reached
  Signal taken;    // messages this rank has made its own
  std::atomic<int32_t> pid, abandoned;
  std::atomic<uint64_t> start;
  char pad[48];
};

struct HostGroup::Header {
  Signal message;  // messages published
  int64_t message_ints;
  char data_path[56];
  Line lines[];
};

HostGroup::HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s)
    : Group(rank, size), spins_(spins), timeout_ns_(int64_t(timeout_s * 1e9)), stopped_since_(size > 0 ? size : 0) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) fail(Status::config, "rank %d of %d ranks on one host; at most %d are supported", rank, size, kMaxRanks);
  const int64_t bytes = round_up(sizeof(Header) + size * sizeof(Line), kPage);
  if (rank == 0) control_.emplace(bytes);
  else control_.emplace(path, bytes);
  header_ = reinterpret_cast<Header*>(control_->data());
  Line& own = header_->lines[rank];
  own.start = look_at(getpid()).start;
  own.pid = getpid();
}

void HostGroup::reserve(const GroupSizes& sizes) {
  sizes_ = sizes;
  partial_bytes_ = round_up(sizes.partial_floats * 4, kPage);
  const int64_t logits_offset = partial_bytes_ * kSlots * size;
  const int64_t mail_offset = logits_offset + round_up(sizes.logit_rows * sizes.vocab * 4, kPage);
  const int64_t bytes = mail_offset + round_up(sizes.message_ints * 4, kPage);
  if (rank == 0) {
    data_.emplace(bytes);
    std::snprintf(header_->data_path, sizeof header_->data_path, "%s", data_->path().c_str());
  }
  meet(kStart);
  if (rank != 0) {
    data_.emplace(header_->data_path, bytes);
    received_.resize(sizes.message_ints);
  }
  logits_ = reinterpret_cast<float*>(data_->data() + logits_offset);
  mailbox_ = reinterpret_cast<int32_t*>(data_->data() + mail_offset);
  std::memset(partial(0), 0, partial_bytes_ * kSlots);  // first touch by the owner
  meet(kStart);
}

void HostGroup::check_alive(int r, int step) {
  const Line& line = header_->lines[r];
  const int pid = line.pid;
  if (line.abandoned) fail(Status::comm, "rank %d (pid %d) failed at or before %s; its own message says why", r, pid, place(step).text);
  if (pid && look_at(pid).start != line.start) fail(Status::comm, "rank %d (pid %d) died at or before %s", r, pid, place(step).text);
}

// For a peer that owes nothing now and therefore has no deadline: it may sleep, but not lie stopped.
void HostGroup::check_awake(int r) {
  const int pid = header_->lines[r].pid;
  if (!pid || !look_at(pid).stopped) {
    stopped_since_[r] = 0;
    return;
  }
  const int64_t now = now_ns();
  if (!stopped_since_[r]) stopped_since_[r] = now;
  if (now - stopped_since_[r] > timeout_ns_) fail(Status::comm, "rank %d (pid %d) has been stopped for more than %.0f s between steps", r, pid, timeout_ns_ / 1e9);
}

void HostGroup::wait_for(Signal& signal, uint32_t count, int r, int step) {
  std::optional<Waited> waited;  // the clock is not asked before the first sleep
  signal.wait(
      spins_, kTickNs, [&](uint32_t v) { return int32_t(v - count) >= 0; },
      [&] {
        check_alive(r, step);
        if (!waited) waited.emplace();
        if (waited->ns() > timeout_ns_)
          fail(Status::comm, "rank %d (pid %d) did not reach %s within %.0f s", r, header_->lines[r].pid.load(), place(step).text, timeout_ns_ / 1e9);
      });
}

void HostGroup::meet(int step) {
  const uint32_t epoch = ++epoch_;
  header_->lines[rank].arrived.set(epoch);
  for (int i = 1; i < size; i++) {
    const int r = (rank + i) % size;
    wait_for(header_->lines[r].arrived, epoch, r, step);
  }
}

void HostGroup::publish(const int32_t* message, int64_t ints) {
  if (ints > sizes_.message_ints) fail(Status::native, "message of %lld ints is larger than the mailbox of %lld", (long long)ints, (long long)sizes_.message_ints);
  for (int r = 1; r < size; r++) wait_for(header_->lines[r].taken, message_, r, 0);  // the mailbox holds one message
  if (ints) std::memcpy(mailbox_, message, ints * 4);
  header_->message_ints = ints;
  header_->message.set(++message_);
}

const int32_t* HostGroup::receive(int64_t* ints) {
  const uint32_t wanted = ++message_;
  header_->message.wait(
      spins_, 5 * kTickNs, [&](uint32_t v) { return int32_t(v - wanted) >= 0; },
      [&] {
        check_alive(0, 0);
        check_awake(0);
      });
  *ints = header_->message_ints;
  std::memcpy(received_.data(), mailbox_, *ints * 4);
  header_->lines[rank].taken.set(wanted);
  return received_.data();
}

void HostGroup::reduce(int, int64_t, int step) { meet(step); }

int HostGroup::parts(int slot, const float** out) {
  for (int r = 0; r < size; r++) out[r] = part(r, slot);
  return size;
}

float* HostGroup::logits(int64_t* stride) {
  *stride = sizes_.vocab;
  return logits_ + sizes_.first_column;
}

void HostGroup::gather(int64_t, int step) { meet(step); }

void HostGroup::check_peers() {
  for (int r = 0; r < size; r++)
    if (r != rank) {
      check_alive(r, 0);
      check_awake(r);
    }
}

void HostGroup::abandon() {
  Line& own = header_->lines[rank];
  own.abandoned = 1;
  own.arrived.set(epoch_);  // wakes who sleeps on it; they look and give up
}

}  // namespace ckdist
