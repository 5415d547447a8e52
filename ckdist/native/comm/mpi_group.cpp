#include "comm/mpi_group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "comm/waiting.h"
#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

namespace {

constexpr int64_t kMostBytes = 1 << 30;       // of one MPI call, whose counts are ints
constexpr int64_t kPatienceNs = 2'000'000;    // a rank without work polls this long before it sleeps between polls
constexpr int64_t kYieldNs = 1'000'000;       // a rank in a step yields this long before it does
constexpr int64_t kLongIdleNs = 200'000'000;  // and longer once it has had nothing to do for so long
constexpr int kIdleUs = 500, kLongIdleUs = 2000, kYieldUs = 50;  // these sleeps
constexpr int kPollPauses = 32;               // a poll of MPI takes as long as this many of a flag

struct Slice {
  int64_t begin, end;
  Slice(int64_t floats, int rank, int size) : begin(floats * rank / size), end(floats * (rank + 1) / size) {}
  int64_t bytes() const { return (end - begin) * 4; }
};

}  // namespace

MpiGroup::MpiGroup(const MpiCalls& calls, int rank, int size, int spins, double timeout_s)
    : Group(rank, size), calls_(calls), spins_(spins / kPollPauses), timeout_ns_(int64_t(timeout_s * 1e9)) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) fail(Status::config, "rank %d of %d ranks; at most %d are supported", rank, size, kMaxRanks);
}

void MpiGroup::reserve(const GroupSizes& sizes) {
  sizes_ = sizes;
  const auto padded = [](int64_t floats) { return (floats + 15) / 16 * 16; };
  const int64_t partial = padded(sizes.partial_floats), message = padded(sizes.message_ints + 1);
  if (message * 4 > kMostBytes) fail(Status::config, "a batch of %lld ints is more than MPI carries in one message of %lld bytes: use a smaller --ctx-size or --parallel", (long long)message, (long long)kMostBytes);
  direct_floats_ = std::min(partial, kDirectBytes / 4);
  slice_floats_ = padded(sizes.partial_floats / size + 1);
  const int64_t logits = padded(sizes.logit_rows * (rank == 0 ? sizes.vocab : sizes.columns));
  memory_.emplace(4 * (kSlots * (2 * partial + size * direct_floats_) + size * slice_floats_ + logits + message), "exchange buffers");
  float* at = reinterpret_cast<float*>(memory_->data());
  const auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
  for (int s = 0; s < kSlots; s++) partial_[s] = take(partial), sum_[s] = take(partial), arrived_[s] = take(size * direct_floats_);
  slices_ = take(size * slice_floats_);
  logits_ = take(logits);
  message_ = reinterpret_cast<int32_t*>(take(message));
  requests_.reserve(size * (kRowsAtOnce + 4));

  shares_.assign(size, {sizes.first_column, sizes.columns});
  if (rank == 0)
    for (int r = 1; r < size; r++) receive(r, kTagShare, &shares_[r], sizeof(Share));
  else send(0, kTagShare, &shares_[rank], sizeof(Share));
  wait(kStart);
  for (int r = 0; rank == 0 && r < size; r++) {
    const auto [first, columns] = shares_[r];
    if (first < 0 || columns < 0 || first > sizes.vocab || columns > sizes.vocab - first)
      fail(Status::comm, "rank %d has logits [%lld, %lld) of %lld", r, (long long)first, (long long)(first + columns), (long long)sizes.vocab);
  }
  idle_since_ = now_ns();
  if (rank == 0 && size > 1) pulse_.emplace(calls_, size, timeout_ns_);
}

void MpiGroup::send(int peer, int tag, const void* data, int64_t bytes) {
  auto* from = static_cast<const uint8_t*>(data);
  for (int64_t n; bytes > 0; from += n, bytes -= n) {
    n = std::min(bytes, kMostBytes);
    requests_.push_back({{}, peer});
    if (calls_.isend(from, int(n), calls_.byte, peer, tag, calls_.comm, requests_.back().handle)) fail(Status::comm, "MPI refused to send %lld bytes to rank %d", (long long)n, peer);
  }
}

void MpiGroup::receive(int peer, int tag, void* data, int64_t bytes) {
  auto* to = static_cast<uint8_t*>(data);
  for (int64_t n; bytes > 0; to += n, bytes -= n) {
    n = std::min(bytes, kMostBytes);
    requests_.push_back({{}, peer});
    if (calls_.irecv(to, int(n), calls_.byte, peer, tag, calls_.comm, requests_.back().handle)) fail(Status::comm, "MPI refused to receive %lld bytes from rank %d", (long long)n, peer);
  }
}

// Requests are waited for in their order: MPI moves all of them, whichever is asked about.
void MpiGroup::wait(int step) {
  Waited waited;
  int polls = 0;
  for (size_t i = 0; i < requests_.size(); i++) {
    for (bool failed; !requests_[i].complete(calls_, &failed);) {
      if (failed) fail(Status::comm, "MPI reports that rank %d is lost at or before %s", requests_[i].peer, place(step).text);
      if (++polls < spins_) continue;
      const int64_t ns = waited.ns();
      if (ns > timeout_ns_) give_up(i, step);
      if (ns < kYieldNs) sched_yield();
      else usleep(kYieldUs);
    }
  }
  requests_.clear();
}

// Names every rank that owes something: one of them may itself be waiting for another.
void MpiGroup::give_up(size_t first, int step) {
  std::string ranks;
  std::vector<bool> named(size);
  int count = 0;
  for (size_t i = first; i < requests_.size(); i++) {
    bool failed;
    const int peer = requests_[i].peer;
    if (named[peer] || (i > first && requests_[i].complete(calls_, &failed))) continue;
    named[peer] = true;
    ranks += (count++ ? ", " : "") + std::to_string(peer);
  }
  fail(Status::comm, "%s %.200s did not reach %s within %.0f s", count > 1 ? "one of ranks" : "rank", ranks.c_str(), place(step).text, timeout_ns_ / 1e9);
}

void MpiGroup::wait_idle() {
  Waited waited;
  for (bool failed; !requests_[0].complete(calls_, &failed);) {
    if (failed) fail(Status::comm, "MPI reports that rank 0 is lost between steps");
    const int64_t ns = waited.ns();
    if (ns > timeout_ns_) fail(Status::comm, "rank 0 has not been heard of for %.0f s between steps: it is dead, stopped or cut off", timeout_ns_ / 1e9);
    if (ns > kPatienceNs) usleep(ns > kLongIdleNs ? kLongIdleUs : kIdleUs);
    else if (ns > kPatienceNs / 8) sched_yield();
  }
  requests_.clear();
}

void MpiGroup::publish(const int32_t* message, int64_t ints) {
  if (ints > sizes_.message_ints) fail(Status::native, "message of %lld ints is larger than the %lld reserved", (long long)ints, (long long)sizes_.message_ints);
  if (!ints && pulse_) pulse_->end(), pulse_.reset();
  message_[0] = int32_t(ints);
  if (ints) std::memcpy(message_ + 1, message, ints * 4);
  for (int r = 1; r < size; r++) send(r, kTagMessage, message_, (ints + 1) * 4);
  wait(0);
}

const int32_t* MpiGroup::receive(int64_t* ints) {
  for (;;) {
    receive(0, kTagMessage, message_, (sizes_.message_ints + 1) * 4);
    wait_idle();
    if (message_[0] != kPulse) break;
    const int32_t answer = 0;
    send(0, kTagAnswer, &answer, sizeof answer);
    wait(0);
  }
  *ints = std::clamp<int64_t>(message_[0], 0, sizes_.message_ints);
  return message_ + 1;
}

void MpiGroup::reduce(int slot, int64_t floats, int step) {
  const float* own = partial_[slot];
  direct_[slot] = floats * 4 <= kDirectBytes;
  if (direct_[slot]) {
    for (int i = 1; i < size; i++) {
      const int r = (rank + i) % size;
      receive(r, kTagPart, arrived(slot, r), floats * 4);
      send(r, kTagPart, own, floats * 4);
    }
    return wait(step);
  }
  const Slice mine(floats, rank, size);
  for (int i = 1; i < size; i++) {
    const int r = (rank + i) % size;
    const Slice theirs(floats, r, size);
    receive(r, kTagSlice, slices_ + r * slice_floats_, mine.bytes());
    send(r, kTagSlice, own + theirs.begin, theirs.bytes());
  }
  wait(step);
  float* sum = sum_[slot];
  for (int r = 0; r < size; r++) {
    const float* part = r == rank ? own + mine.begin : slices_ + r * slice_floats_;
    for (int64_t i = 0; i < mine.end - mine.begin; i++) sum[mine.begin + i] = r ? sum[mine.begin + i] + part[i] : part[i];
  }
  for (int i = 1; i < size; i++) {
    const int r = (rank + i) % size;
    const Slice theirs(floats, r, size);
    receive(r, kTagSum, sum + theirs.begin, theirs.bytes());
    send(r, kTagSum, sum + mine.begin, mine.bytes());
  }
  wait(step);
}

int MpiGroup::parts(int slot, const float** out) {
  if (!direct_[slot]) return out[0] = sum_[slot], 1;
  for (int r = 0; r < size; r++) out[r] = r == rank ? partial_[slot] : arrived(slot, r);
  return size;
}

float* MpiGroup::logits(int64_t* stride) {
  *stride = rank == 0 ? sizes_.vocab : sizes_.columns;
  return logits_ + (rank == 0 ? sizes_.first_column : 0);
}

// Row by row, straight into place: no rank needs a second copy of the logits.
void MpiGroup::gather(int64_t rows, int step) {
  for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
    for (int64_t t = begin; t < std::min(rows, begin + kRowsAtOnce); t++) {
      if (rank != 0) send(0, kTagLogits, logits_ + t * sizes_.columns, sizes_.columns * 4);
      for (int r = 1; rank == 0 && r < size; r++) receive(r, kTagLogits, logits_ + t * sizes_.vocab + shares_[r].first, shares_[r].columns * 4);
    }
    wait(step);
  }
  idle_since_ = now_ns();
}

void MpiGroup::check_peers() {
  if (pulse_) pulse_->check(idle_since_);
}

}  // namespace ckdist
