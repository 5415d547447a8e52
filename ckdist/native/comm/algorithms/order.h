// Defines the order of reductions over ranks. No other code does.
//
// Within a host, ranks are added from the lowest to the highest. Then the hosts' results are added, in the order of the
// hosts' lowest ranks. Values of 16 bits are converted to float32 first and rounded once, at the end. The transport,
// the algorithm, the size of the message and its division have no influence. For this reason no ring reduction is used:
// its order depends on the index of an element. Algorithms move original values (or whole results of hosts) and fold
// them here.
#pragma once
#include <vector>

#include "kernels/reduce.h"

namespace ckdist {

constexpr int kMaxRanks = 1024;

class Order {
 public:
  explicit Order(const std::vector<int>& host_of_rank);  // any numbers, equal for ranks of one host

  int size() const { return size_; }
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host_of(int rank) const { return host_of_[rank]; }    // index into hosts()
  int index_of(int rank) const { return index_of_[rank]; }  // index of a rank among the ranks of its host
  int smallest_host() const;                                // its number of ranks

  // Type of a host's result: float32 if several values of 16 bits were added.
  Element partial(Element e) const { return widened_ && (e == Element::bf16 || e == Element::f16) ? Element::f32 : e; }
  // parts: values of the ranks of one host, in rank order.
  void fold_host(Element e, ReduceOp op, void* out, const void* const* parts, int count, int64_t n) const;
  // parts: results of all hosts, of type partial(e).
  void fold_hosts(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts, int64_t n) const;
  // parts: values of all ranks, in rank order.
  void fold_ranks(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts, int64_t n) const;

 private:
  int size_;
  bool widened_;  // there are several hosts, and a host has several ranks
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, index_of_;
};

}  // namespace ckdist
