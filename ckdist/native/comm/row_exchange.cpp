#include "comm/row_exchange.h"

#include <algorithm>
#include <cstring>

namespace ckdist {

RowExchange::RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes, bool alike, int threads)
    : ranks_(ranks),
      host_(ranks.host()),
      hosts_(ranks.host_count()),
      place_(alike ? ranks.local_rank : 0),
      places_(alike ? ranks.local_size : 1),
      row_bytes_(row_bytes),
      memory_((2 * (rows + hosts_) + threads) * row_bytes, "rows between hosts"),
      sent_(memory_.data()),
      received_(sent_ + (rows + hosts_) * row_bytes),
      own_(received_ + (rows + hosts_) * row_bytes),
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

// Begins to receive from every other host and to send to it. Data of the hosts follows one another at `in` and at
// `out`.
template <class In, class Out>
void RowExchange::exchange(uint8_t* in, const In& in_bytes, const uint8_t* out, const Out& out_bytes, int step) {
  for (int k = 1; k < hosts_; k++) {
    const int64_t bytes = in_bytes(other(k));
    receive(other(k), in, bytes);
    in += bytes;
  }
  for (int k = 1; k < hosts_; k++) {
    const int64_t bytes = out_bytes(other(k));
    send(other(k), out, bytes);
    out += bytes;
  }
  wait(step);
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

const float* RowExchange::summand(Partial in, int64_t begin, int64_t end, float* room) const {
  if (places_ == 1) return in.rows + begin;
  ranks_.fold_local(in.slot, begin, end, room);
  return room;
}

void RowExchange::all_gather(Team& team, uint8_t* base, int64_t stride, int step) {
  team.meet([&] {
    turn_ ^= 1;
    uint8_t* in = passed_on(place_);
    for (int k = 1; k < hosts_; k++) {
      const int64_t bytes = count_of(other(k), place_) * stride;
      receive(other(k), places_ > 1 ? in : base + first(other(k)) * stride, bytes);
      in += bytes;
    }
    for (int k = 1; k < hosts_; k++)
      send(other(k), base + first_of(host_, place_) * stride, count_of(host_, place_) * stride);
    wait(step);
    meet(step);
  });
  if (places_ == 1) return;
  for (int place = 0; place < places_; place++) {
    const uint8_t* in = passed_on(place);
    for (int k = 1; k < hosts_; k++) {
      const int64_t rows = count_of(other(k), place);
      const auto [begin, end] = team.share(rows);
      std::memcpy(base + (first_of(other(k), place) + begin) * stride, in + begin * stride,
                  size_t((end - begin) * stride));
      in += rows * stride;
    }
  }
  team.meet();
}

void RowExchange::reduce_scatter(Team& team, Partial in, float* out, int64_t width, int step) {
  const int64_t floats = count_of(host_, place_) * width;
  const float* parts[kMaxRanks];
  float *back = reinterpret_cast<float*>(received_), *room = reinterpret_cast<float*>(sent_);
  for (int k = 1; k < hosts_; k++, back += floats) parts[other(k)] = back;
  team.meet([&] {
    turn_ ^= 1;
    meet(step);
  });
  // Sums of other hosts' rows are computed for sending; sums of this host's rows are added to the received ones.
  const float* given[kMaxRanks];
  for (int k = 1; k <= hosts_; k++) {
    const int64_t first = first_of(other(k), place_) * width, count = count_of(other(k), place_) * width;
    const auto [begin, end] = team.share(count);
    given[other(k)] = summand(in, first + begin, first + end, room + begin) - begin;
    room += count;
  }
  parts[host_] = given[host_];
  team.meet([&] {
    for (int k = 1; k < hosts_; k++) receive(other(k), const_cast<float*>(parts[other(k)]), floats * 4);
    for (int k = 1; k < hosts_; k++) send(other(k), given[other(k)], count_of(other(k), place_) * width * 4);
    wait(step);
  });
  const auto [begin, end] = team.share(floats);
  for (int h = 0; h < hosts_; h++) parts[h] += begin;
  ranks_.fold_hosts(sums(out, width) + begin, parts, end - begin);
  give_sums(team, out, width, step);
}

// Copies the sums that the ranks of this host computed to all of them.
void RowExchange::give_sums(Team& team, float* out, int64_t width, int step) {
  team.meet([&] { meet(step); });
  if (places_ == 1) return;
  for (int place = 0; place < places_; place++) {
    const auto [begin, end] = team.share(count_of(host_, place) * width);
    std::memcpy(out + first_of(host_, place) * width + begin, reinterpret_cast<float*>(passed_on(place)) + begin,
                size_t(end - begin) * 4);
  }
  team.meet();
}

void RowExchange::dispatch(Team& team, const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step) {
  uint8_t* out = sent_;
  for (int k = 1; k < hosts_; k++) {
    const Range rows = listed(to, other(k), host_, place_), own = team.share(rows.end - rows.begin);
    for (int64_t i = own.begin; i < own.end; i++)
      std::memcpy(out + i * stride, base + to.rows[rows.begin + i] * stride, size_t(stride));
    out += (rows.end - rows.begin) * stride;
  }
  team.meet([&] {
    turn_ ^= 1;
    exchange(
        passed_on(place_), [&](int h) { return listed_count(from, h, h) * stride; }, sent_,
        [&](int h) { return listed_count(to, h, host_) * stride; }, step);
    meet(step);
  });
  for (int place = 0; place < places_; place++) {
    const uint8_t* in = passed_on(place);
    for (int k = 1; k < hosts_; k++) {
      const Range rows = listed(from, other(k), other(k), place), own = team.share(rows.end - rows.begin);
      for (int64_t i = own.begin; i < own.end; i++)
        std::memcpy(base + from.rows[rows.begin + i] * stride, in + i * stride, size_t(stride));
      in += (rows.end - rows.begin) * stride;
    }
  }
  team.meet();
}

void RowExchange::combine(Team& team, const Lists& to, const Lists& from, Partial in, float* out, int64_t width,
                          int step) {
  team.meet([&] {
    turn_ ^= 1;
    meet(step);
  });
  float* given = reinterpret_cast<float*>(sent_);
  for (int k = 1; k < hosts_; k++) {
    const Range rows = listed(from, other(k), other(k), place_), own = team.share(rows.end - rows.begin);
    for (int64_t i = own.begin; i < own.end; i++) {
      const int64_t first = from.rows[rows.begin + i] * width;
      float* const row = given + i * width;
      if (const float* const of = summand(in, first, first + width, row); of != row) std::copy(of, of + width, row);
    }
    given += (rows.end - rows.begin) * width;
  }
  team.meet([&] {
    exchange(
        received_, [&](int h) { return listed_count(to, h, host_) * width * 4; }, sent_,
        [&](int h) { return listed_count(from, h, h) * width * 4; }, step);
  });
  add_returned(team, to, in, out, width);
  give_sums(team, out, width, step);
}

// The sums of this thread's part of the rows that this rank carries, with the returned results of other hosts.
void RowExchange::add_returned(Team& team, const Lists& to, Partial in, float* out, int64_t width) const {
  const Range own = team.share(count_of(host_, place_));
  const int64_t first = first_of(host_, place_);
  // For each host: the row to add next, and its index in `to`.
  const float *next[kMaxRanks], *back = reinterpret_cast<const float*>(received_);
  int64_t at[kMaxRanks] = {}, end[kMaxRanks] = {};
  for (int k = 1; k < hosts_; k++) {
    const int h = other(k);
    const Range rows = listed(to, h, host_, place_);
    at[h] = std::lower_bound(to.rows + rows.begin, to.rows + rows.end, first + own.begin) - to.rows, end[h] = rows.end;
    next[h] = back + (at[h] - rows.begin) * width;
    back += (rows.end - rows.begin) * width;
  }
  float *const sum = sums(out, width), *const room = reinterpret_cast<float*>(own_ + team.thread * row_bytes_);
  const float* parts[kMaxRanks];
  for (int64_t i = own.begin; i < own.end; i++) {
    const int64_t row = first + i;
    for (int h = 0; h < hosts_; h++) {
      parts[h] = zeros_.data();
      if (h == host_ || at[h] == end[h] || to.rows[at[h]] != row) continue;
      parts[h] = next[h];
      next[h] += width, at[h]++;
    }
    parts[host_] = summand(in, row * width, (row + 1) * width, room);
    ranks_.fold_hosts(sum + i * width, parts, width);
  }
}

}  // namespace ckdist
