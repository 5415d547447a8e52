// The order in which the ranks' values are combined: the one place that defines it.
//
// Within a host, ranks from the lowest to the highest; then the hosts' results, hosts in the order of their lowest
// rank. Values of 16 bits are widened to float32 first and rounded once, at the end. Nothing else has a say: not the
// transport, not the algorithm, not the size of the message or where it was split. So a ring that sums on the way is
// not used anywhere: its order depends on where an element lies. Algorithms move raw values (or whole hosts' results)
// and fold them here.
#pragma once
#include <vector>

#include "kernels/reduce.h"

namespace ckdist {

constexpr int kMaxRanks = 256;

class Order {
 public:
  explicit Order(const std::vector<int>& host_of_rank);  // any numbers, equal for ranks of one host

  int size() const { return size_; }
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host_of(int rank) const { return host_of_[rank]; }    // index into hosts()
  int index_of(int rank) const { return index_of_[rank]; }  // of a rank among its host's

  // A host's result travels as float32 where several values of 16 bits went into it.
  Element partial(Element e) const { return widened_ && (e == Element::bf16 || e == Element::f16) ? Element::f32 : e; }
  // parts: of one host's ranks, in their order.
  void fold_host(Element e, ReduceOp op, void* out, const void* const* parts, int count, int64_t n) const;
  // parts: all hosts' results, of type partial(e).
  void fold_hosts(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts, int64_t n) const;
  // parts: by rank.
  void fold_ranks(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts, int64_t n) const;

 private:
  int size_;
  bool widened_;  // some host has several ranks, and there are several hosts
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, index_of_;
};

}  // namespace ckdist
