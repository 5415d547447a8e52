// Exchanges rows of a value that is sharded over hosts. Each host has a range of rows, and works only on those between
// the products that need all rows.
//
// Ranks of the same local rank exchange with each other. If the ranks of a host have different rows, each rank
// exchanges its own. If they all have the same rows, each rank carries a part: it adds the host's summands of its
// part, exchanges the sums, and passes the results to the other ranks of the host in shared memory. A sum is computed
// where its row is, in the order of comm/algorithms/order.h, so it has the same bits as an all_reduce. Copies and
// additions are divided among the threads of a rank; one thread sends and receives. No memory is allocated after
// construction.
#pragma once
#include <cstdint>
#include <vector>

#include "comm/step_communicator.h"
#include "core/arena.h"
#include "core/team.h"

namespace ckdist {

class RowExchange {
 public:
  // Rows grouped by host: the rows of host h are rows[starts[h]] to rows[starts[h + 1]], ascending.
  struct Lists {
    int32_t *rows, *starts;
  };
  // A value that is partial over hosts: row 0 of this rank's summand. If ranks of a host have the same rows, it is in
  // `slot`.
  struct Partial {
    const float* rows;
    int slot;
  };
  // Maximum number of rows in a list, for a batch of `rows` rows.
  static int64_t most(int64_t rows, int hosts) { return (hosts - 1) * ((rows + hosts - 1) / hosts); }

  // For at most `rows` rows of at most `row_bytes` bytes (not less than a row of a sum), and teams of at most `threads`
  // threads.
  RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes, bool alike, int threads);
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  // Sets the number of rows for the calls below.
  void begin(int64_t rows) { rows_ = rows; }
  int64_t first(int host) const { return rows_ * host / hosts_; }
  int64_t count(int host) const { return first(host + 1) - first(host); }

  // All threads of a team must make each call. A call begins with a barrier, except `dispatch`, which the caller must
  // precede with one. Every call ends with a barrier. `step` is named in errors.

  // Gathers every host's rows of `base` on all hosts.
  void all_gather(Team& team, uint8_t* base, int64_t stride, int step);
  // out = this host's rows of the sum over hosts.
  void reduce_scatter(Team& team, Partial in, float* out, int64_t width, int step);
  // Sends own rows to the hosts in `to`, and receives the rows of `from` from their owners.
  void dispatch(Team& team, const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step);
  // The reverse of dispatch: like reduce_scatter, but another host contributes only to the rows in its `from`. A
  // missing contribution counts as zero.
  void combine(Team& team, const Lists& to, const Lists& from, Partial in, float* out, int64_t width, int step);

 private:
  int other(int k) const { return (host_ + k) % hosts_; }  // the k-th host after this one
  // The first of a host's rows that the rank with local rank `place` carries.
  int64_t first_of(int host, int place) const { return first(host) + count(host) * place / places_; }
  int64_t count_of(int host, int place) const { return first_of(host, place + 1) - first_of(host, place); }
  // Index in the list of host `host` of the first row of `owner` that the rank with local rank `place` carries.
  int32_t at(const Lists& lists, int host, int owner, int place) const;
  // Range in the list of host `host`: the rows of `owner` that the rank with local rank `place` carries.
  Range listed(const Lists& lists, int host, int owner, int place) const {
    return {at(lists, host, owner, place), at(lists, host, owner, place + 1)};
  }
  int64_t listed_count(const Lists& lists, int host, int owner) const {  // of those that this rank carries
    const Range rows = listed(lists, host, owner, place_);
    return rows.end - rows.begin;
  }
  // Memory in which the rank with local rank `place` leaves data for all ranks of the host, to read after a barrier.
  uint8_t* passed_on(int place) const { return places_ > 1 ? ranks_.rows(turn_, place) : received_; }
  // Memory for the sums that this rank computes, for its part of the host's rows.
  float* sums(float* out, int64_t width) const {
    return places_ > 1 ? reinterpret_cast<float*>(passed_on(place_)) : out + first(host_) * width;
  }
  // Floats [begin, end) of this host's sums of all rows: in place, or in `room`.
  const float* summand(Partial in, int64_t begin, int64_t end, float* room) const;
  void add_returned(Team& team, const Lists& to, Partial in, float* out, int64_t width) const;
  void give_sums(Team& team, float* out, int64_t width, int step);
  // Barrier of the ranks of this host, if they share rows.
  void meet(int step);
  void send(int host, const void* data, int64_t bytes);
  void receive(int host, void* data, int64_t bytes);
  template <class In, class Out>
  void exchange(uint8_t* in, const In& in_bytes, const uint8_t* out, const Out& out_bytes, int step);
  void wait(int step);

  StepCommunicator& ranks_;
  const int host_, hosts_, place_, places_;
  const int64_t row_bytes_;
  int64_t rows_ = 0;
  int turn_ = 0;  // halves of the shared memory alternate: all ranks pass one before the other is written again
  Arena memory_;
  uint8_t *const sent_, *const received_, *const own_;  // rows in flight; one row for each thread
  const bool registered_;                               // the memory is registered with the transport
  std::vector<float> zeros_;
  std::vector<Channel::Pending> pending_;
};

}  // namespace ckdist
