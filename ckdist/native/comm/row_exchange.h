// Rows of a value that the hosts share out: each host has a range of them, and works on those alone between the
// products that need all rows.
//
// What is exchanged goes between the ranks of one place on each host. Where ranks of a host have different rows, each
// exchanges its own. Where they have the same rows (`alike`), each carries its share of what the host exchanges, adds
// up the host's summands of that, and passes it on in memory that the host's ranks share. A sum is made where its row
// is, in the order of comm/algorithms/order.h, so its bits are those of an all_reduce. The threads of a rank share out
// what is copied and added; one of them sends and receives. Nothing is allocated after the start.
#pragma once
#include <cstdint>
#include <vector>

#include "comm/step_communicator.h"
#include "core/arena.h"
#include "core/team.h"

namespace ckdist {

class RowExchange {
 public:
  // Rows by host, in their order: those of host h are rows[starts[h]] up to rows[starts[h + 1]], and ascend.
  struct Lists {
    int32_t *rows, *starts;
  };
  // A value that is partial over hosts: this rank's summand of row 0; where ranks have the same rows it is in `slot`.
  struct Partial {
    const float* rows;
    int slot;
  };
  // Rows that lists have at most, of `rows` in all.
  static int64_t most(int64_t rows, int hosts) { return (hosts - 1) * ((rows + hosts - 1) / hosts); }

  // Of at most `rows` rows of at most `row_bytes`, which are at least those of a sum; in teams of at most `threads`.
  RowExchange(StepCommunicator& ranks, int64_t rows, int64_t row_bytes, bool alike, int threads);
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  // The calls below are about so many rows.
  void begin(int64_t rows) { rows_ = rows; }
  int64_t first(int host) const { return rows_ * host / hosts_; }
  int64_t count(int host) const { return first(host + 1) - first(host); }

  // All threads of a team make each call, and meet in it first, but for `dispatch`, before which they have met. They
  // have met at its end. `step` names the place in errors.

  // Every host's rows of `base` become all hosts'.
  void all_gather(Team& team, uint8_t* base, int64_t stride, int step);
  // out = the sums over the hosts, of this host's rows.
  void reduce_scatter(Team& team, Partial in, float* out, int64_t width, int step);
  // Own rows go to the hosts that `to` names for them, and the rows of `from` come from those that have them.
  void dispatch(Team& team, const Lists& to, const Lists& from, uint8_t* base, int64_t stride, int step);
  // The way back: as reduce_scatter, where another host gives what it has of rows in its `from` alone. Of a host that
  // gives nothing the summand is zero.
  void combine(Team& team, const Lists& to, const Lists& from, Partial in, float* out, int64_t width, int step);

 private:
  int other(int k) const { return (host_ + k) % hosts_; }  // the k-th host after this one
  // Of a host's rows the first that the rank of a place carries.
  int64_t first_of(int host, int place) const { return first(host) + count(host) * place / places_; }
  int64_t count_of(int host, int place) const { return first_of(host, place + 1) - first_of(host, place); }
  // Where in a list of host `host` those rows of `owner` begin that the rank of a place carries.
  int32_t at(const Lists& lists, int host, int owner, int place) const;
  // Of a list's rows of host `host` those of `owner` that the rank of a place carries.
  Range listed(const Lists& lists, int host, int owner, int place) const {
    return {at(lists, host, owner, place), at(lists, host, owner, place + 1)};
  }
  // Where the rank of a place leaves what all ranks of the host read after a barrier.
  uint8_t* passed_on(int place) const { return places_ > 1 ? ranks_.rows(turn_, place) : received_; }
  // Where this rank leaves the sums that it makes: of its share of the host's rows.
  float* sums(float* out, int64_t width) const {
    return places_ > 1 ? reinterpret_cast<float*>(passed_on(place_)) : out + first(host_) * width;
  }
  // Floats [begin, end) of this host's sums of all rows: where they lie, or in `room`.
  const float* summand(Partial in, int64_t begin, int64_t end, float* room) const;
  void add_returned(Team& team, const Lists& to, Partial in, float* out, int64_t width) const;
  void give_sums(Team& team, float* out, int64_t width, int step);
  // The ranks of this host, where they exchange with one another.
  void meet(int step);
  void send(int host, const void* data, int64_t bytes);
  void receive(int host, void* data, int64_t bytes);
  void wait(int step);

  StepCommunicator& ranks_;
  const int host_, hosts_, place_, places_;
  const int64_t row_bytes_;
  int64_t rows_ = 0;
  int turn_ = 0;  // halves of the shared memory alternate: one is written again after everyone passed the other
  Arena memory_;
  uint8_t *const sent_, *const received_, *const own_;  // rows on their way, and one of each thread
  const bool registered_;                               // the transport was told of the memory
  std::vector<float> zeros_;
  std::vector<Channel::Pending> pending_;
};

}  // namespace ckdist
