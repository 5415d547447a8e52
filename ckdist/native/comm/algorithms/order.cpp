#include "comm/algorithms/order.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/kernels.h"

namespace ckdist {

namespace {
constexpr int64_t kOrderBlock = 2048;  // elements that are folded at a time, one host after the other

int row(Element e) {
  if (e == Element::byte) fail(Status::config, "bytes cannot be reduced: use int8");
  return static_cast<int>(e);
}
}  // namespace

Order::Order(const std::vector<int>& host_of_rank)
    : size_(int(host_of_rank.size())), host_of_(size_), index_of_(size_) {
  std::vector<int> names;
  for (int r = 0; r < size_; r++) {
    const size_t at = std::find(names.begin(), names.end(), host_of_rank[r]) - names.begin();
    if (at == names.size()) names.push_back(host_of_rank[r]), hosts_.emplace_back();
    host_of_[r] = int(at), index_of_[r] = int(hosts_[at].size());
    hosts_[at].push_back(r);
  }
  widened_ = hosts_.size() > 1 && int(hosts_.size()) < size_;
}

int Order::smallest_host() const {
  int least = size_;
  for (const std::vector<int>& host : hosts_) least = std::min(least, int(host.size()));
  return least;
}

void Order::fold_host(Element e, ReduceOp op, void* out, const void* const* parts, int count, int64_t n) const {
  const ReduceKernel& k = kernels().reduce;
  (widened_ ? k.widen : k.fold)[row(e)][int(op)](&out, 1, parts, count, n);
}

void Order::fold_hosts(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts,
                       int64_t n) const {
  const ReduceKernel& k = kernels().reduce;
  (widened_ ? k.narrow : k.fold)[row(e)][int(op)](outs, out_count, parts, int(hosts_.size()), n);
}

void Order::fold_ranks(Element e, ReduceOp op, void* const* outs, int out_count, const void* const* parts,
                       int64_t n) const {
  if (!widened_) return kernels().reduce.fold[row(e)][int(op)](outs, out_count, parts, size_, n);
  const int64_t bytes = element_bytes(e);
  const int hosts = int(hosts_.size());
  std::vector<float> room(hosts * kOrderBlock);
  std::vector<const void*> partials(hosts), some(size_);
  std::vector<void*> to(out_count);
  for (int64_t i = 0; i < n; i += kOrderBlock) {
    const int64_t m = std::min(kOrderBlock, n - i);
    for (int h = 0; h < hosts; h++) {
      int count = 0;
      for (int r : hosts_[h]) some[count++] = static_cast<const uint8_t*>(parts[r]) + i * bytes;
      fold_host(e, op, room.data() + h * kOrderBlock, some.data(), count, m);
      partials[h] = room.data() + h * kOrderBlock;
    }
    for (int o = 0; o < out_count; o++) to[o] = static_cast<uint8_t*>(outs[o]) + i * bytes;
    fold_hosts(e, op, to.data(), out_count, partials.data(), m);
  }
}

}  // namespace ckdist
