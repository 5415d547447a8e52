#include "comm/mpi_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

namespace {

enum Tag : int { kMessage = 1, kPart = 2, kSlice = 3, kSum = 4, kLogits = 5 };
constexpr int64_t kColumnsHeader = 64;
constexpr int64_t kPatienceNs = 2'000'000;  // an idle rank polls this long before it starts to sleep between polls

struct Slice {
  int64_t begin, end;
  Slice(int64_t floats, int rank, int size) : begin(floats * rank / size), end(floats * (rank + 1) / size) {}
  int64_t bytes() const { return (end - begin) * 4; }
};

}  // namespace

MpiGroup::MpiGroup(const MpiCalls& calls, int rank, int size, double timeout_s) : Group(rank, size), calls_(calls), timeout_ns_(int64_t(timeout_s * 1e9)) {
  if (size > kMaxRanks) fail(Status::config, "%d ranks; at most %d are supported", size, kMaxRanks);
  requests_.reserve(4 * size);
}

void MpiGroup::reserve(int64_t partial_floats, int64_t logit_rows, int64_t vocab, int64_t message_ints) {
  const auto padded = [](int64_t floats) { return (floats + 15) / 16 * 16; };
  partial_floats_ = padded(partial_floats);
  direct_floats_ = std::min(partial_floats_, kDirectBytes / 4);
  slice_floats_ = padded(partial_floats / size + 1);
  logit_rows_ = logit_rows, vocab_ = vocab, message_ints_ = message_ints;
  const int64_t columns_bytes = kColumnsHeader + 4 * padded(logit_rows * vocab);
  const int64_t floats = kSlots * (2 * partial_floats_ + size * direct_floats_) + size * slice_floats_ + padded(logit_rows * vocab) + padded(message_ints + 1);
  memory_.emplace(4 * floats + columns_bytes * (rank == 0 ? size : 1), "exchange buffers");
  float* at = reinterpret_cast<float*>(memory_->data());
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  for (int s = 0; s < kSlots; s++) partial_[s] = take(partial_floats_), sum_[s] = take(partial_floats_), arrived_[s] = take(size * direct_floats_);
  slices_ = take(size * slice_floats_);
  logits_ = take(padded(logit_rows * vocab));
  message_ = reinterpret_cast<int32_t*>(take(padded(message_ints + 1)));
  columns_ = inbox_ = reinterpret_cast<uint8_t*>(at);
}

void MpiGroup::send(int peer, int tag, const void* data, int64_t bytes) {
  requests_.push_back({{}, peer, false});
  if (calls_.isend(data, int(bytes), calls_.byte, peer, tag, calls_.comm, requests_.back().handle)) fail(Status::comm, "MPI refused to send %lld bytes to rank %d", (long long)bytes, peer);
}

void MpiGroup::receive(int peer, int tag, void* data, int64_t bytes) {
  requests_.push_back({{}, peer, false});
  if (calls_.irecv(data, int(bytes), calls_.byte, peer, tag, calls_.comm, requests_.back().handle)) fail(Status::comm, "MPI refused to receive %lld bytes from rank %d", (long long)bytes, peer);
}

void MpiGroup::wait(int step, bool idle) {
  const int64_t start = now_ns();
  alignas(16) uint8_t status[256];  // larger than any implementation's MPI_Status
  for (size_t left = requests_.size(); left;) {
    const Request* waiting = nullptr;
    for (Request& r : requests_) {
      if (r.done) continue;
      int flag = 0;
      if (calls_.test(r.handle, &flag, status)) fail(Status::comm, "MPI reports that rank %d is lost at step %d", r.peer, step);
      if (flag) r.done = true, left--;
      else waiting = &r;
    }
    if (!left) break;
    const int64_t waited = now_ns() - start;
    if (idle && waited > kPatienceNs) usleep(500);
    if (!idle && waited > timeout_ns_) fail(Status::comm, "rank %d did not reach step %d within %.0f s", waiting->peer, step, timeout_ns_ / 1e9);
  }
  requests_.clear();
}

void MpiGroup::publish(const int32_t* message, int64_t ints) {
  if (ints > message_ints_) fail(Status::native, "message of %lld ints is larger than the %lld reserved", (long long)ints, (long long)message_ints_);
  message_[0] = int32_t(ints);
  if (ints) std::memcpy(message_ + 1, message, ints * 4);
  for (int r = 1; r < size; r++) send(r, kMessage, message_, (ints + 1) * 4);
  wait(0);
}

const int32_t* MpiGroup::receive(int64_t* ints) {
  receive(0, kMessage, message_, (message_ints_ + 1) * 4);
  wait(0, true);
  *ints = std::clamp<int64_t>(message_[0], 0, message_ints_);
  return message_ + 1;
}

float* MpiGroup::partial(int slot) { return partial_[slot]; }

void MpiGroup::reduce(int slot, int64_t floats, int step) {
  const float* own = partial_[slot];
  direct_[slot] = floats * 4 <= kDirectBytes;
  if (direct_[slot]) {
    for (int i = 1; i < size; i++) {
      const int r = (rank + i) % size;
      receive(r, kPart, arrived(slot, r), floats * 4);
      send(r, kPart, own, floats * 4);
    }
    return wait(step);
  }
  const Slice mine(floats, rank, size);
  for (int i = 1; i < size; i++) {
    const int r = (rank + i) % size;
    const Slice theirs(floats, r, size);
    receive(r, kSlice, slices_ + r * slice_floats_, mine.bytes());
    send(r, kSlice, own + theirs.begin, theirs.bytes());
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
    receive(r, kSum, sum + theirs.begin, theirs.bytes());
    send(r, kSum, sum + mine.begin, mine.bytes());
  }
  wait(step);
}

int MpiGroup::parts(int slot, const float** out) {
  if (!direct_[slot]) return out[0] = sum_[slot], 1;
  for (int r = 0; r < size; r++) out[r] = r == rank ? partial_[slot] : arrived(slot, r);
  return size;
}

float* MpiGroup::logits(int64_t column, int64_t columns, int64_t* stride) {
  *stride = rank == 0 ? vocab_ : columns;
  return rank == 0 ? logits_ + column : reinterpret_cast<float*>(columns_ + kColumnsHeader);
}

void MpiGroup::gather(int64_t rows, int64_t column, int64_t columns, int step) {
  const int64_t capacity = kColumnsHeader + 4 * rows * vocab_;
  if (rank != 0) {
    const int64_t header[] = {column, columns};
    std::memcpy(columns_, header, sizeof header);
    send(0, kLogits, columns_, kColumnsHeader + 4 * rows * columns);
    return wait(step);
  }
  const int64_t each = kColumnsHeader + 4 * logit_rows_ * vocab_;
  for (int r = 1; r < size; r++) receive(r, kLogits, inbox_ + r * each, capacity);
  wait(step);
  for (int r = 1; r < size; r++) {
    int64_t header[2];
    std::memcpy(header, inbox_ + r * each, sizeof header);
    const auto [first, count] = header;
    if (first < 0 || count < 0 || first + count > vocab_) fail(Status::comm, "rank %d sent logits [%lld, %lld) of %lld", r, (long long)first, (long long)(first + count), (long long)vocab_);
    const float* from = reinterpret_cast<const float*>(inbox_ + r * each + kColumnsHeader);
    for (int64_t t = 0; t < rows; t++) std::memcpy(logits_ + t * vocab_ + first, from + t * count, count * 4);
  }
}

const float* MpiGroup::gathered() { return logits_; }

}  // namespace ckdist
