#include "comm/row_exchange.h"

#include <algorithm>
#include <cstring>

namespace ckdist {

RowExchange::RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes)
    : ranks_(ranks),
      host_(ranks.host()),
      hosts_(ranks.host_count()),
      memory_(2 * most(rows, hosts_) * row_bytes, "rows between hosts"),
      sent_(memory_.data()),
      received_(sent_ + most(rows, hosts_) * row_bytes),
      zeros_(size_t(row_bytes / 4)) {
  pending_.reserve(size_t(2 * hosts_));
}

void RowExchange::send(int host, const void* data, int64_t bytes) {
  if (bytes > 0) pending_.push_back(ranks_.isend(ranks_.same_place(host), data, bytes));
}

void RowExchange::receive(int host, void* data, int64_t bytes) {
  if (bytes > 0) pending_.push_back(ranks_.irecv(ranks_.same_place(host), data, bytes));
}

void RowExchange::wait(int step) {
  for (Channel::Pending& message : pending_) ranks_.wait(message, step);
  pending_.clear();
}

void RowExchange::all_gather(uint8_t* base, int64_t stride, int step) {
  for (int k = 1; k < hosts_; k++) receive(other(k), base + first(other(k)) * stride, count(other(k)) * stride);
  for (int k = 1; k < hosts_; k++) send(other(k), base + first(host_) * stride, count(host_) * stride);
  wait(step);
}

void RowExchange::reduce_scatter(const float* in, float* out, int64_t width, int step) {
  const int64_t floats = count(host_) * width;
  const float* parts[kMaxRanks];
  parts[host_] = in + first(host_) * width;
  for (int k = 1; k < hosts_; k++) {
    float* const at = reinterpret_cast<float*>(received_) + (k - 1) * floats;
    parts[other(k)] = at;
    receive(other(k), at, floats * 4);
  }
  for (int k = 1; k < hosts_; k++) send(other(k), in + first(other(k)) * width, count(other(k)) * width * 4);
  wait(step);
  ranks_.fold_hosts(out + first(host_) * width, parts, floats);
}

void RowExchange::dispatch(const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step) {
  uint8_t *in = received_, *out = sent_;
  for (int k = 1; k < hosts_; k++) {
    const int64_t bytes = (from.starts[other(k) + 1] - from.starts[other(k)]) * stride;
    receive(other(k), in, bytes);
    in += bytes;
  }
  for (int k = 1; k < hosts_; k++) {
    const uint8_t* const begin = out;
    for (int32_t i = to.starts[other(k)]; i < to.starts[other(k) + 1]; i++, out += stride)
      std::memcpy(out, base + to.rows[i] * stride, size_t(stride));
    send(other(k), begin, out - begin);
  }
  wait(step);
  in = received_;
  for (int k = 1; k < hosts_; k++)
    for (int32_t i = from.starts[other(k)]; i < from.starts[other(k) + 1]; i++, in += stride)
      std::memcpy(base + from.rows[i] * stride, in, size_t(stride));
}

void RowExchange::combine(const Lists& to, const Lists& from, const float* in, float* out, int64_t width, int step) {
  float *back = reinterpret_cast<float*>(received_), *given = reinterpret_cast<float*>(sent_);
  const float* next[kMaxRanks];  // what came of a host's rows and was not added yet
  for (int k = 1; k < hosts_; k++) {
    const int64_t floats = (to.starts[other(k) + 1] - to.starts[other(k)]) * width;
    next[other(k)] = back;
    receive(other(k), back, floats * 4);
    back += floats;
  }
  for (int k = 1; k < hosts_; k++) {
    const float* const begin = given;
    for (int32_t i = from.starts[other(k)]; i < from.starts[other(k) + 1]; i++, given += width)
      std::copy(in + from.rows[i] * width, in + (from.rows[i] + 1) * width, given);
    send(other(k), begin, (given - begin) * 4);
  }
  wait(step);
  int32_t at[kMaxRanks];
  std::copy(to.starts, to.starts + hosts_, at);
  const float* parts[kMaxRanks];
  for (int64_t row = first(host_); row < first(host_) + count(host_); row++) {
    for (int h = 0; h < hosts_; h++) {
      parts[h] = h == host_ ? in + row * width : zeros_.data();
      if (h == host_ || at[h] == to.starts[h + 1] || to.rows[at[h]] != row) continue;
      parts[h] = next[h];
      next[h] += width, at[h]++;
    }
    ranks_.fold_hosts(out + row * width, parts, width);
  }
}

}  // namespace ckdist
