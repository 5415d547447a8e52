#include "comm/hybrid_collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/signature.h"

namespace ckdist {

HybridCollectives::HybridCollectives(std::shared_ptr<Channel> channel, const Order& order, const Thresholds& thresholds, Meeting& meeting,
                                     std::shared_ptr<HostMemory> memory, std::vector<int> arenas)
    : FlatCollectives(std::move(channel), order, thresholds), meeting_(meeting), memory_(std::move(memory)), arenas_(std::move(arenas)),
      host_(order.host_of(channel_->rank)), index_(order.index_of(channel_->rank)), room_(static_cast<uint8_t*>(memory_->allocate(kSegment))),
      room_offset_(memory_->offset(room_, kSegment)) {
  owners_ = order.size();
  for (const auto& host : order.hosts()) owners_ = std::min(owners_, int(host.size()));
}

HybridCollectives::~HybridCollectives() { memory_->release(room_); }

// partials: (hosts, bytes), this host's own filled in; the others' come from the ranks with place `index` there.
void HybridCollectives::exchange(uint8_t* partials, int64_t bytes, int index, const char* what) {
  const int hosts = int(order_.hosts().size());
  for (int k = 1; k < hosts; k++) {
    const int h = (host_ + k) % hosts;
    pending_.push_back(channel_->irecv(order_.hosts()[h][index], Channel::kHosts, partials + h * bytes, bytes));
  }
  for (int k = 1; k < hosts; k++) {
    const int h = (host_ + k) % hosts;
    pending_.push_back(channel_->isend(order_.hosts()[h][index], Channel::kHosts, partials + host_ * bytes, bytes));
  }
  channel_->wait(pending_, what);
}

void HybridCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  const char* what = begin("all_reduce");
  meeting_.begin("all_reduce");
  const int hosts = int(order_.hosts().size()), local = meeting_.size;
  const int64_t element = element_bytes(e), bytes = n * element, part = element_bytes(order_.partial(e));
  const int owners = bytes <= thresholds_.leaders_bytes ? 1 : owners_;
  const bool placed = memory_->offset(in, bytes) >= 0 && memory_->offset(out, bytes) >= 0;
  std::vector<const void*> parts(std::max(local, hosts));
  std::vector<void*> outs(local);
  for (int64_t first = 0; first == 0 || first < n; first += kSegment / element) {
    const int64_t m = std::min(n - first, kSegment / element);
    const uint8_t* from = static_cast<const uint8_t*>(in) + first * element;
    uint8_t* to = static_cast<uint8_t*>(out) + first * element;
    if (!placed && m) std::memcpy(room_, from, size_t(m * element));
    const uint32_t epoch = meeting_.post({placed ? memory_->offset(from, 0) : room_offset_, placed ? memory_->offset(to, 0) : room_offset_, signature(Call::reduce, n, reduction(e, op))});
    meeting_.await(epoch);
    if (index_ < owners) {
      const int64_t begin = m * index_ / owners, mine = m * (index_ + 1) / owners - begin;
      partials_.resize(size_t(std::max<int64_t>(1, hosts * mine * part)));
      for (int i = 0; i < local; i++) parts[i] = peer(i, meeting_.record(i, epoch).in) + begin * element;
      order_.fold_host(e, op, partials_.data() + host_ * mine * part, parts.data(), local, mine);
      exchange(partials_.data(), mine * part, index_, what);
      for (int h = 0; h < hosts; h++) parts[h] = partials_.data() + h * mine * part;
      for (int i = 0; i < local; i++) outs[i] = peer(i, meeting_.record(i, epoch).out) + begin * element;
      order_.fold_hosts(e, op, outs.data(), local, parts.data(), mine);
    }
    meeting_.meet();
    if (!placed && m) std::memcpy(to, room_, size_t(m * element));
  }
}

// One rank of each host, the same for all hosts, folds the host's part of a slice and sends it to the slice's owner.
void HybridCollectives::reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) {
  const char* what = begin("reduce_scatter");
  meeting_.begin("reduce_scatter");
  const int hosts = int(order_.hosts().size()), local = meeting_.size, rank = channel_->rank;
  const int64_t element = element_bytes(e), part = element_bytes(order_.partial(e));
  const int64_t most = kSegment / channel_->size / element;  // elements of every rank's slice in one segment
  const int64_t longest = *std::max_element(counts, counts + channel_->size);
  const uint64_t call = signature(Call::reduce_scatter, std::accumulate(counts, counts + channel_->size, int64_t(0)), reduction(e, op));
  std::vector<uint8_t> result(size_t(counts[rank] * element));
  std::vector<const void*> parts(std::max(local, hosts));
  for (int64_t first = 0; first < longest; first += most) {
    const auto count = [&](int r) { return std::clamp<int64_t>(counts[r] - first, 0, most); };
    for (int r = 0; r < channel_->size; r++) {
      const uint8_t* from = static_cast<const uint8_t*>(in) + (std::accumulate(counts, counts + r, int64_t(0)) + first) * element;
      if (count(r)) std::memcpy(room_ + r * most * element, from, size_t(count(r) * element));
    }
    const uint32_t epoch = meeting_.post({room_offset_, -1, call});
    meeting_.await(epoch);
    std::vector<std::vector<uint8_t>> sums(channel_->size);
    const auto folded = [&](int r) {
      sums[r].resize(size_t(std::max<int64_t>(1, count(r) * part)));
      for (int i = 0; i < local; i++) parts[i] = peer(i, meeting_.record(i, epoch).in) + r * most * element;
      order_.fold_host(e, op, sums[r].data(), parts.data(), local, count(r));
    };
    const auto folder = [&](int r, int h) { return order_.hosts()[h][order_.index_of(r) % order_.hosts()[h].size()]; };
    partials_.resize(size_t(std::max<int64_t>(1, hosts * count(rank) * part)));
    for (int h = 0; h < hosts; h++)
      if (h != host_) pending_.push_back(channel_->irecv(folder(rank, h), Channel::kHosts, partials_.data() + h * count(rank) * part, count(rank) * part));
    for (int r = 0; r < channel_->size; r++) {
      if (r != rank && (order_.host_of(r) == host_ || folder(r, host_) != rank)) continue;
      folded(r);
      if (r != rank) pending_.push_back(channel_->isend(r, Channel::kHosts, sums[r].data(), count(r) * part));
    }
    channel_->wait(pending_, what);
    std::memcpy(partials_.data() + host_ * count(rank) * part, sums[rank].data(), size_t(count(rank) * part));
    for (int h = 0; h < hosts; h++) parts[h] = partials_.data() + h * count(rank) * part;
    void* to = result.data() + first * element;
    order_.fold_hosts(e, op, &to, 1, parts.data(), count(rank));
    meeting_.meet();
  }
  if (!result.empty()) std::memcpy(out, result.data(), result.size());
}

// The root's host passes it on to the first rank of every other host; inside, everyone reads it from one room.
void HybridCollectives::broadcast(void* data, int64_t bytes, int root) {
  const char* what = begin("broadcast");
  meeting_.begin("broadcast");
  const int hosts = int(order_.hosts().size()), root_host = order_.host_of(root);
  const int source = host_ == root_host ? order_.index_of(root) : 0;
  for (int64_t first = 0; first == 0 || first < bytes; first += kSegment) {
    const int64_t m = std::min(bytes - first, kSegment);
    uint8_t* at = static_cast<uint8_t*>(data) + first;
    if (index_ == source) {
      if (host_ == root_host) {
        for (int h = 0; h < hosts; h++)
          if (h != host_) pending_.push_back(channel_->isend(order_.hosts()[h][0], Channel::kHosts, at, m));
      } else {
        pending_.push_back(channel_->irecv(root, Channel::kHosts, at, m));
      }
      channel_->wait(pending_, what);
      if (m) std::memcpy(room_, at, size_t(m));
    }
    const uint32_t epoch = meeting_.post({room_offset_, -1, signature(Call::broadcast, bytes, root)});
    meeting_.await(epoch);
    if (index_ != source && m) std::memcpy(at, peer(source, meeting_.record(source, epoch).in), size_t(m));
    meeting_.meet();
  }
}

void HybridCollectives::barrier() {
  const char* what = begin("barrier");
  meeting_.begin("barrier");
  meeting_.await(meeting_.post({-1, -1, signature(Call::barrier, 0)}));
  partials_.resize(order_.hosts().size());
  if (index_ == 0) exchange(partials_.data(), 1, 0, what);
  meeting_.meet();
}

}  // namespace ckdist
