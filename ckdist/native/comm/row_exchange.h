// Rows of a value that the hosts share out: each host has a range of them, and works on those alone between the
// products that need all rows.
//
// What is exchanged goes between the ranks of one place on each host, which have the same rows. A sum is made where its
// row is, in the order of comm/algorithms/order.h, so its bits are those of an all_reduce. Nothing is allocated after
// the start.
#pragma once
#include <cstdint>
#include <vector>

#include "comm/step_communicator.h"
#include "core/arena.h"

namespace ckdist {

class RowExchange {
 public:
  // Rows by host, in their order: those of host h are rows[starts[h]] up to rows[starts[h + 1]].
  struct Lists {
    int32_t *rows, *starts;
  };
  // Rows that lists have at most, of `rows` in all.
  static int64_t most(int64_t rows, int hosts) { return (hosts - 1) * ((rows + hosts - 1) / hosts); }

  // Of at most `rows` rows of at most `row_bytes`, which are at least those of a sum.
  RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes);

  // The calls below are about so many rows.
  void begin(int64_t rows) { rows_ = rows; }
  int64_t first(int host) const { return rows_ * host / hosts_; }
  int64_t count(int host) const { return first(host + 1) - first(host); }

  // `step` names the place in errors.

  // Every host's rows of `base` become all hosts'.
  void all_gather(uint8_t* base, int64_t stride, int step);
  // out = the sums over the hosts of `in`, of this host's rows.
  void reduce_scatter(const float* in, float* out, int64_t width, int step);
  // Own rows go to the hosts that `to` names for them, and the rows of `from` come from those that have them.
  void dispatch(const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step);
  // The way back: as reduce_scatter, where another host gives what it has of rows in its `from` alone. Of a host that
  // gives nothing the summand is zero.
  void combine(const Lists& to, const Lists& from, const float* in, float* out, int64_t width, int step);

 private:
  int other(int k) const { return (host_ + k) % hosts_; }  // the k-th host after this one
  void send(int host, const void* data, int64_t bytes);
  void receive(int host, void* data, int64_t bytes);
  void wait(int step);

  StepCommunicator& ranks_;
  const int host_, hosts_;
  int64_t rows_ = 0;
  Arena memory_;
  uint8_t *const sent_, *const received_;  // rows on their way
  std::vector<float> zeros_;
  std::vector<Channel::Pending> pending_;
};

}  // namespace ckdist
