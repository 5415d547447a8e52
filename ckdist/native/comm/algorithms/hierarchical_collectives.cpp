#include "comm/algorithms/hierarchical_collectives.h"

#include <algorithm>
#include <cstring>

#include "comm/algorithms/signature.h"
#include "core/error.h"

namespace ckdist {

HierarchicalCollectives::HierarchicalCollectives(std::shared_ptr<Channel> channel, const Order& order,
                                                 const Thresholds& thresholds, ShmRendezvous& rendezvous,
                                                 std::shared_ptr<HostMemory> memory, std::vector<int> arenas)
    : FlatCollectives(std::move(channel), order, thresholds),
      rendezvous_(rendezvous),
      memory_(std::move(memory)),
      arenas_(std::move(arenas)),
      host_(order.host_of(channel_->rank)),
      index_(order.index_of(channel_->rank)),
      leaders_(order.smallest_host()),
      staging_(static_cast<uint8_t*>(memory_->allocate(kSegment, false))),
      staging_offset_(memory_->offset(staging_, kSegment)) {
  outs_.resize(size_t(rendezvous_.size));
}

HierarchicalCollectives::~HierarchicalCollectives() { memory_->release(staging_); }

CallName HierarchicalCollectives::begin(const char* name, uint64_t signature) {
  rendezvous_.begin(name, signature);
  return FlatCollectives::begin(name, signature);
}

// Exchanges partial results. partials: (hosts, bytes); this host's row is filled in. The other rows come from the ranks
// with local rank `index` on the other hosts.
void HierarchicalCollectives::exchange(uint8_t* partials, int64_t bytes, int index, const CallName& call) {
  const int hosts = int(order_.hosts().size());
  for (int k = 1; k < hosts; k++) {
    const int h = (host_ + k) % hosts;
    pending_.push_back(channel_->irecv(order_.hosts()[h][index], Channel::kHosts, partials + h * bytes, bytes));
  }
  for (int k = 1; k < hosts; k++) {
    const int h = (host_ + k) % hosts;
    pending_.push_back(channel_->isend(order_.hosts()[h][index], Channel::kHosts, partials + host_ * bytes, bytes));
  }
  channel_->wait(pending_, call);
}

void HierarchicalCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  const CallName call = begin("all_reduce", signature(Call::reduce, n, reduction(e, op)));
  const int hosts = int(order_.hosts().size()), local = rendezvous_.size;
  const int64_t element = element_bytes(e), bytes = n * element, part = element_bytes(order_.partial(e));
  const int leaders = bytes <= thresholds_.leaders_bytes ? 1 : leaders_;
  const bool placed = memory_->offset(in, bytes) >= 0 && memory_->offset(out, bytes) >= 0;
  for (int64_t first = 0; first == 0 || first < n; first += kSegment / element) {
    const int64_t m = std::min(n - first, kSegment / element);
    const uint8_t* from = static_cast<const uint8_t*>(in) + first * element;
    uint8_t* to = static_cast<uint8_t*>(out) + first * element;
    if (!placed && m) std::memcpy(staging_, from, size_t(m * element));
    const uint32_t epoch = rendezvous_.meet(
        {placed ? memory_->offset(from, 0) : staging_offset_, placed ? memory_->offset(to, 0) : staging_offset_});
    if (index_ < leaders) {
      const int64_t begin = m * index_ / leaders, mine = m * (index_ + 1) / leaders - begin;
      partials_.resize(size_t(std::max<int64_t>(1, hosts * mine * part)));
      for (int i = 0; i < local; i++) parts_[i] = peer(i, rendezvous_.record(i, epoch).in) + begin * element;
      order_.fold_host(e, op, partials_.data() + host_ * mine * part, parts_.data(), local, mine);
      exchange(partials_.data(), mine * part, index_, call);
      for (int h = 0; h < hosts; h++) parts_[h] = partials_.data() + h * mine * part;
      for (int i = 0; i < local; i++) outs_[i] = peer(i, rendezvous_.record(i, epoch).out) + begin * element;
      order_.fold_hosts(e, op, outs_.data(), local, parts_.data(), mine);
    }
    rendezvous_.meet();
    if (!placed && m) std::memcpy(to, staging_, size_t(m * element));
  }
}

// In each host, the rank with the same local rank folds the host's part of a slice and sends it to the slice's owner.
void HierarchicalCollectives::reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) {
  const CallName call =
      begin("reduce_scatter", signature(Call::reduce_scatter, sum_before(counts, channel_->size), reduction(e, op)));
  const int hosts = int(order_.hosts().size()), local = rendezvous_.size, rank = channel_->rank;
  const int64_t element = element_bytes(e), part = element_bytes(order_.partial(e));
  const int64_t most = kSegment / channel_->size / element;  // elements of each rank's slice in one segment
  const int64_t longest = *std::max_element(counts, counts + channel_->size);
  held_.resize(size_t(counts[rank] * element));
  for (int64_t first = 0; first < longest; first += most) {
    const auto count = [&](int r) { return std::clamp<int64_t>(counts[r] - first, 0, most); };
    for (int r = 0; r < channel_->size; r++) {
      const uint8_t* from = static_cast<const uint8_t*>(in) + (sum_before(counts, r) + first) * element;
      if (count(r)) std::memcpy(staging_ + r * most * element, from, size_t(count(r) * element));
    }
    const uint32_t epoch = rendezvous_.meet({staging_offset_, -1});
    scratch_.resize(size_t(channel_->size * most * part));
    const auto sum = [&](int r) { return scratch_.data() + r * most * part; };
    const auto fold = [&](int r) {
      for (int i = 0; i < local; i++) parts_[i] = peer(i, rendezvous_.record(i, epoch).in) + r * most * element;
      order_.fold_host(e, op, sum(r), parts_.data(), local, count(r));
    };
    const auto folder = [&](int r, int h) { return order_.hosts()[h][order_.index_of(r) % order_.hosts()[h].size()]; };
    partials_.resize(size_t(std::max<int64_t>(1, hosts * count(rank) * part)));
    for (int h = 0; h < hosts; h++)
      if (h != host_)
        pending_.push_back(channel_->irecv(folder(rank, h), Channel::kHosts, partials_.data() + h * count(rank) * part,
                                           count(rank) * part));
    for (int r = 0; r < channel_->size; r++) {
      if (r != rank && (order_.host_of(r) == host_ || folder(r, host_) != rank)) continue;
      fold(r);
      if (r != rank) pending_.push_back(channel_->isend(r, Channel::kHosts, sum(r), count(r) * part));
    }
    channel_->wait(pending_, call);
    std::memcpy(partials_.data() + host_ * count(rank) * part, sum(rank), size_t(count(rank) * part));
    for (int h = 0; h < hosts; h++) parts_[h] = partials_.data() + h * count(rank) * part;
    void* to = held_.data() + first * element;
    order_.fold_hosts(e, op, &to, 1, parts_.data(), count(rank));
    rendezvous_.meet();
  }
  if (!held_.empty()) std::memcpy(out, held_.data(), held_.size());
}

// Every part is sent once to each other host, to one rank there. All ranks of that host read it from that rank's
// buffer.
void HierarchicalCollectives::all_gather(const void* in, void* out, const int64_t* bytes) {
  const int size = channel_->size, rank = channel_->rank, hosts = int(order_.hosts().size());
  const CallName call = begin("all_gather", signature(Call::gather, sum_before(bytes, size)));
  const int64_t most = kSegment / size, longest = *std::max_element(bytes, bytes + size);
  uint8_t* const to = static_cast<uint8_t*>(out);
  uint8_t* const own = to + sum_before(bytes, rank);
  if (own != in && bytes[rank]) std::memmove(own, in, size_t(bytes[rank]));
  const auto place_on = [&](int r, int h) {
    return order_.index_of(r) % int(order_.hosts()[h].size());
  };  // of the rank that has r's part on a host
  for (int64_t first = 0; first == 0 || first < longest; first += most) {
    const auto some = [&](int r) { return std::clamp<int64_t>(bytes[r] - first, 0, most); };
    for (int r = 0; r < size; r++)
      if (order_.host_of(r) != host_ && place_on(r, host_) == index_)
        pending_.push_back(channel_->irecv(r, Channel::kHosts, staging_ + r * most, some(r)));
    for (int h = 0; h < hosts; h++)
      if (h != host_)
        pending_.push_back(channel_->isend(order_.hosts()[h][place_on(rank, h)], Channel::kHosts,
                                           own + std::min(first, bytes[rank]), some(rank)));
    if (some(rank)) std::memcpy(staging_ + rank * most, own + first, size_t(some(rank)));
    channel_->wait(pending_, call);
    const uint32_t epoch = rendezvous_.meet({staging_offset_, -1});
    for (int r = 0; r < size; r++)
      if (r != rank && some(r))
        std::memcpy(to + sum_before(bytes, r) + first,
                    peer(place_on(r, host_), rendezvous_.record(place_on(r, host_), epoch).in) + r * most,
                    size_t(some(r)));
    rendezvous_.meet();
  }
}

// Ranks of other hosts receive messages. Ranks of this host read each other's buffers: one cell for every local rank,
// followed by the number of bytes for each rank.
void HierarchicalCollectives::all_to_all(const void* in, const int64_t* send_bytes, void* out,
                                         const int64_t* recv_bytes) {
  const int size = channel_->size, local = rendezvous_.size;
  const CallName call = begin("all_to_all", signature(Call::all_to_all, 0));
  const auto& here = order_.hosts()[host_];
  const int64_t cell = (kSegment / local - int64_t(sizeof(int64_t))) / 64 * 64;
  const uint8_t* from = static_cast<const uint8_t*>(in);
  if (in == out) held_.assign(from, from + sum_before(send_bytes, size)), from = held_.data();
  uint8_t* const to = static_cast<uint8_t*>(out);
  int64_t* const table = reinterpret_cast<int64_t*>(staging_ + local * cell);
  for (int r = 0; r < size; r++)
    if (order_.host_of(r) != host_)
      pending_.push_back(channel_->irecv(r, Channel::kCollective, to + sum_before(recv_bytes, r), recv_bytes[r]));
  for (int r = 0; r < size; r++)
    if (order_.host_of(r) != host_)
      pending_.push_back(channel_->isend(r, Channel::kCollective, from + sum_before(send_bytes, r), send_bytes[r]));
  int64_t longest = 0;
  for (int i = 0; i < local; i++) longest = std::max(longest, table[i] = send_bytes[here[i]]);
  for (int64_t first = 0; first == 0 || first < longest; first += cell) {
    const auto some = [&](int64_t bytes) { return std::clamp<int64_t>(bytes - first, 0, cell); };
    for (int i = 0; i < local; i++)
      if (const int64_t n = some(send_bytes[here[i]]))
        std::memcpy(staging_ + i * cell, from + sum_before(send_bytes, here[i]) + first, size_t(n));
    const uint32_t epoch = rendezvous_.meet({staging_offset_, longest});
    for (int i = 0; i < local; i++) {
      const uint8_t* const room = peer(i, rendezvous_.record(i, epoch).in);
      const int64_t sent = reinterpret_cast<const int64_t*>(room + local * cell)[index_], wanted = recv_bytes[here[i]];
      rendezvous_.check_sent(i, sent, index_, wanted);
      longest = std::max(longest, rendezvous_.record(i, epoch).out);
      if (const int64_t n = some(wanted))
        std::memcpy(to + sum_before(recv_bytes, here[i]) + first, room + index_ * cell, size_t(n));
    }
    rendezvous_.meet();
  }
  channel_->wait(pending_, call);
}

// The root sends the data to the first rank of every other host. All ranks of a host read it from one
// buffer.
void HierarchicalCollectives::broadcast(void* data, int64_t bytes, int root) {
  const CallName call = begin("broadcast", signature(Call::broadcast, bytes, root));
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
      channel_->wait(pending_, call);
      if (m) std::memcpy(staging_, at, size_t(m));
    }
    const uint32_t epoch = rendezvous_.meet({staging_offset_, -1});
    if (index_ != source && m) std::memcpy(at, peer(source, rendezvous_.record(source, epoch).in), size_t(m));
    rendezvous_.meet();
  }
}

void HierarchicalCollectives::barrier() {
  const CallName call = begin("barrier", signature(Call::barrier, 0));
  rendezvous_.meet();
  partials_.resize(order_.hosts().size());
  if (index_ == 0) exchange(partials_.data(), 1, 0, call);
  rendezvous_.meet();
}

}  // namespace ckdist
