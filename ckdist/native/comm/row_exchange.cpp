#include "comm/row_exchange.h"

#include <algorithm>
#include <cstring>

namespace ckdist {

RowExchange::RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes, bool alike)
    : ranks_(ranks),
      host_(ranks.host()),
      hosts_(ranks.host_count()),
      place_(alike ? ranks.local_rank : 0),
      places_(alike ? ranks.local_size : 1),
      memory_(2 * (rows + hosts_) * row_bytes, "rows between hosts"),
      sent_(memory_.data()),
      received_(sent_ + (rows + hosts_) * row_bytes),
      registered_(ranks.register_memory(memory_.data(), memory_.size())),
      zeros_(size_t(row_bytes / 4)) {
  pending_.reserve(size_t(2 * hosts_));
}

RowExchange::~RowExchange() {
  if (registered_) ranks_.forget_memory(memory_.data());
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

void RowExchange::meet(int step) {
  if (places_ > 1) ranks_.all_gather(step);
}

int32_t RowExchange::at(const Lists& lists, int host, int owner, int place) const {
  const int32_t *const begin = lists.rows + lists.starts[host], *const end = lists.rows + lists.starts[host + 1];
  return int32_t(std::lower_bound(begin, end, first_of(owner, place)) - lists.rows);
}

const float* RowExchange::summand(Partial in, int64_t row, int64_t rows, int64_t width, float* room) const {
  if (places_ == 1) return in.rows + row * width;
  ranks_.fold_local(in.slot, row * width, (row + rows) * width, room);
  return room;
}

void RowExchange::all_gather(uint8_t* base, int64_t stride, int step) {
  uint8_t* in = passed_on(place_);
  for (int k = 1; k < hosts_; k++) {
    const int64_t bytes = count_of(other(k), place_) * stride;
    receive(other(k), places_ > 1 ? in : base + first(other(k)) * stride, bytes);
    in += bytes;
  }
  for (int k = 1; k < hosts_; k++)
    send(other(k), base + first_of(host_, place_) * stride, count_of(host_, place_) * stride);
  wait(step);
  if (places_ == 1) return;
  meet(step);
  for (int place = 0; place < places_; place++) {
    in = passed_on(place);
    for (int k = 1; k < hosts_; k++) {
      const int64_t bytes = count_of(other(k), place) * stride;
      std::memcpy(base + first_of(other(k), place) * stride, in, size_t(bytes));
      in += bytes;
    }
  }
  turn_ ^= 1;
}

void RowExchange::reduce_scatter(Partial in, float* out, int64_t width, int step) {
  meet(step);
  const int64_t floats = count_of(host_, place_) * width;
  const float* parts[kMaxRanks];
  float *back = reinterpret_cast<float*>(received_), *room = reinterpret_cast<float*>(sent_);
  for (int k = 1; k < hosts_; k++, back += floats) {
    parts[other(k)] = back;
    receive(other(k), back, floats * 4);
  }
  for (int k = 1; k < hosts_; k++) {
    const int64_t rows = count_of(other(k), place_);
    send(other(k), summand(in, first_of(other(k), place_), rows, width, room), rows * width * 4);
    room += rows * width;
  }
  parts[host_] = summand(in, first_of(host_, place_), count_of(host_, place_), width, room);
  wait(step);
  ranks_.fold_hosts(places_ > 1 ? reinterpret_cast<float*>(passed_on(place_)) : out + first(host_) * width, parts,
                    floats);
  give_sums(out, width, step);
}

// The sums that the ranks of this host made become each one's.
void RowExchange::give_sums(float* out, int64_t width, int step) {
  if (places_ == 1) return;
  meet(step);
  for (int place = 0; place < places_; place++)
    std::memcpy(out + first_of(host_, place) * width, passed_on(place), size_t(count_of(host_, place) * width * 4));
  turn_ ^= 1;
}

void RowExchange::dispatch(const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step) {
  uint8_t *in = passed_on(place_), *out = sent_;
  for (int k = 1; k < hosts_; k++) {
    const int h = other(k);
    const int64_t bytes = (at(from, h, h, place_ + 1) - at(from, h, h, place_)) * stride;
    receive(h, in, bytes);
    in += bytes;
  }
  for (int k = 1; k < hosts_; k++) {
    const int h = other(k);
    const uint8_t* const begin = out;
    for (int32_t i = at(to, h, host_, place_); i < at(to, h, host_, place_ + 1); i++, out += stride)
      std::memcpy(out, base + to.rows[i] * stride, size_t(stride));
    send(h, begin, out - begin);
  }
  wait(step);
  meet(step);
  for (int place = 0; place < places_; place++) {
    in = passed_on(place);
    for (int k = 1; k < hosts_; k++) {
      const int32_t end = at(from, other(k), other(k), place + 1);
      for (int32_t i = at(from, other(k), other(k), place); i < end; i++, in += stride)
        std::memcpy(base + from.rows[i] * stride, in, size_t(stride));
    }
  }
  if (places_ > 1) turn_ ^= 1;
}

void RowExchange::combine(const Lists& to, const Lists& from, Partial in, float* out, int64_t width, int step) {
  meet(step);
  float *back = reinterpret_cast<float*>(received_), *given = reinterpret_cast<float*>(sent_);
  const float* next[kMaxRanks];  // what came of a host's rows and was not added yet
  int32_t listed[kMaxRanks];     // and where its row stands in `to`
  for (int k = 1; k < hosts_; k++) {
    const int h = other(k);
    listed[h] = at(to, h, host_, place_), next[h] = back;
    const int64_t floats = (at(to, h, host_, place_ + 1) - listed[h]) * width;
    receive(h, back, floats * 4);
    back += floats;
  }
  for (int k = 1; k < hosts_; k++) {
    const int h = other(k);
    const float* const begin = given;
    const int32_t end = at(from, h, h, place_ + 1);
    for (int32_t i = at(from, h, h, place_); i < end; i++, given += width)
      if (const float* const row = summand(in, from.rows[i], 1, width, given); row != given)
        std::copy(row, row + width, given);
    send(h, begin, (given - begin) * 4);
  }
  wait(step);
  const float* parts[kMaxRanks];
  float* sum = places_ > 1 ? reinterpret_cast<float*>(passed_on(place_)) : out + first(host_) * width;
  const int64_t begin = first_of(host_, place_), end = first_of(host_, place_ + 1);
  for (int64_t row = begin; row < end; row++, sum += width) {
    for (int h = 0; h < hosts_; h++) {
      parts[h] = zeros_.data();
      if (h == host_ || listed[h] == to.starts[h + 1] || to.rows[listed[h]] != row) continue;
      parts[h] = next[h];
      next[h] += width, listed[h]++;
    }
    parts[host_] = summand(in, row, 1, width, given);
    ranks_.fold_hosts(sum, parts, width);
  }
  give_sums(out, width, step);
}

}  // namespace ckdist
