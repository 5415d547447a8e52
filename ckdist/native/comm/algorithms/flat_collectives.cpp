#include "comm/algorithms/flat_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/algorithms/signature.h"

namespace ckdist {

namespace {

constexpr int64_t kSegment = 16 << 20;  // bytes of a large reduction in flight at once
constexpr int kFewRanks = 8;            // up to this number, a barrier sends one message to each rank
// Up to this size two ranks exchange everything: slices would move the same bytes in two steps.
constexpr int64_t kTwoRanks = 256 << 10;
constexpr auto kTag = Channel::kCollective;

}  // namespace

FlatCollectives::FlatCollectives(std::shared_ptr<Channel> channel, const Order& order, const Thresholds& thresholds)
    : channel_(std::move(channel)), order_(order), thresholds_(thresholds), parts_(size_t(order.size())) {}

CallName FlatCollectives::begin(const char* name, uint64_t signature) {
  channel_->mark(signature + calls_);
  pending_.clear();
  return {name, int64_t(++calls_)};
}

// Starts to receive from every other rank and to send to it. Both functions return the place and the bytes for a rank.
template <class To, class From>
void FlatCollectives::start(const To& to, const From& from) {
  const int size = channel_->size, rank = channel_->rank;
  for (int k = 1; k < size; k++) {
    const auto [place, bytes] = to((rank + k) % size);
    pending_.push_back(channel_->irecv((rank + k) % size, kTag, place, bytes));
  }
  for (int k = 1; k < size; k++) {
    const auto [place, bytes] = from((rank + k) % size);
    pending_.push_back(channel_->isend((rank + k) % size, kTag, place, bytes));
  }
}

// Recursive doubling. blocks: (size, bytes), this rank's block first, then those of the following ranks, modulo size.
// After the step of distance d a rank has 2 * d blocks.
void FlatCollectives::gather_doubling(uint8_t* blocks, int64_t bytes, const CallName& call) {
  const int size = channel_->size, rank = channel_->rank;
  for (int d = 1; d < size; d *= 2) {
    const int64_t some = std::min(d, size - d) * bytes;
    pending_.push_back(channel_->irecv((rank + d) % size, kTag, blocks + d * bytes, some));
    pending_.push_back(channel_->isend((rank + size - d) % size, kTag, blocks, some));
    channel_->wait(pending_, call);
  }
}

void FlatCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  const CallName call = begin("all_reduce", signature(Call::reduce, n, reduction(e, op)));
  const int size = channel_->size, rank = channel_->rank;
  const int64_t element = element_bytes(e), bytes = n * element;
  if (bytes <=
      (size == 2 ? std::max(thresholds_.transport_direct_bytes, kTwoRanks) : thresholds_.transport_direct_bytes)) {
    scratch_.resize(size_t(std::max<int64_t>(1, size * bytes)));
    if (bytes) std::memcpy(scratch_.data(), in, size_t(bytes));
    const auto block = [&](int r) { return scratch_.data() + (r - rank + size) % size * bytes; };
    if (size > kFewRanks) {
      gather_doubling(scratch_.data(), bytes, call);
    } else {
      start([&](int r) { return std::pair(block(r), bytes); }, [&](int) { return std::pair(scratch_.data(), bytes); });
      channel_->wait(pending_, call);
    }
    for (int r = 0; r < size; r++) parts_[r] = block(r);
    order_.fold_ranks(e, op, &out, 1, parts_.data(), n);
    return;
  }
  for (int64_t first = 0; first < n; first += kSegment / element) {
    const int64_t m = std::min(n - first, kSegment / element);
    const uint8_t* from = static_cast<const uint8_t*>(in) + first * element;
    uint8_t* to = static_cast<uint8_t*>(out) + first * element;
    const auto begin_of = [&](int r) { return m * r / size; };
    const auto slice = [&](auto* base, int r) {
      return std::pair(base + begin_of(r) * element, (begin_of(r + 1) - begin_of(r)) * element);
    };
    const int64_t mine = begin_of(rank + 1) - begin_of(rank);
    scratch_.resize(size_t(size * mine * element));
    start([&](int r) { return std::pair(scratch_.data() + r * mine * element, mine * element); },
          [&](int r) { return slice(from, r); });
    channel_->wait(pending_, call);
    for (int r = 0; r < size; r++)
      parts_[r] = r == rank ? from + begin_of(rank) * element : scratch_.data() + r * mine * element;
    void* result = to + begin_of(rank) * element;
    order_.fold_ranks(e, op, &result, 1, parts_.data(), mine);
    start([&](int r) { return slice(to, r); }, [&](int) { return slice(to, rank); });
    channel_->wait(pending_, call);
  }
}

void FlatCollectives::reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) {
  const CallName call =
      begin("reduce_scatter", signature(Call::reduce_scatter, sum_before(counts, channel_->size), reduction(e, op)));
  const int size = channel_->size, rank = channel_->rank;
  const int64_t element = element_bytes(e), mine = counts[rank];
  const uint8_t* from = static_cast<const uint8_t*>(in);
  scratch_.resize(size_t(std::max<int64_t>(1, size * mine * element)));
  start([&](int r) { return std::pair(scratch_.data() + r * mine * element, mine * element); },
        [&](int r) { return std::pair(from + sum_before(counts, r) * element, counts[r] * element); });
  channel_->wait(pending_, call);
  for (int r = 0; r < size; r++) parts_[r] = scratch_.data() + r * mine * element;
  // `out` may be `in`, and this rank's part of `in` may lie at another offset.
  if (mine)
    std::memcpy(scratch_.data() + rank * mine * element, from + sum_before(counts, rank) * element,
                size_t(mine * element));
  order_.fold_ranks(e, op, &out, 1, parts_.data(), mine);
}

void FlatCollectives::all_gather(const void* in, void* out, const int64_t* bytes) {
  const CallName call = begin("all_gather", signature(Call::gather, sum_before(bytes, channel_->size)));
  const int rank = channel_->rank;
  uint8_t* to = static_cast<uint8_t*>(out);
  uint8_t* own = to + sum_before(bytes, rank);
  if (own != in && bytes[rank]) std::memmove(own, in, size_t(bytes[rank]));
  start([&](int r) { return std::pair(to + sum_before(bytes, r), bytes[r]); },
        [&](int) { return std::pair(own, bytes[rank]); });
  channel_->wait(pending_, call);
}

void FlatCollectives::all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) {
  const CallName call = begin("all_to_all", signature(Call::all_to_all, 0));
  const int size = channel_->size, rank = channel_->rank;
  const uint8_t* from = static_cast<const uint8_t*>(in);
  if (in == out) held_.assign(from, from + sum_before(send_bytes, size)), from = held_.data();
  uint8_t* to = static_cast<uint8_t*>(out);
  start([&](int r) { return std::pair(to + sum_before(recv_bytes, r), recv_bytes[r]); },
        [&](int r) { return std::pair(from + sum_before(send_bytes, r), send_bytes[r]); });
  if (send_bytes[rank])
    std::memcpy(to + sum_before(recv_bytes, rank), from + sum_before(send_bytes, rank), size_t(send_bytes[rank]));
  channel_->wait(pending_, call);
}

// A binomial tree: in every step, each rank that has the data sends it to one rank that does not.
void FlatCollectives::broadcast(void* data, int64_t bytes, int root) {
  const CallName call = begin("broadcast", signature(Call::broadcast, bytes, root));
  const int size = channel_->size, place = (channel_->rank - root + size) % size;
  int step = 1;
  while (step <= place) step *= 2;  // this rank receives in the step before
  if (place) channel_->wait(channel_->irecv((place - step / 2 + root) % size, kTag, data, bytes), call);
  for (; place + step < size; step *= 2)
    pending_.push_back(channel_->isend((place + step + root) % size, kTag, data, bytes));
  channel_->wait(pending_, call);
}

void FlatCollectives::barrier() {
  const CallName call = begin("barrier", signature(Call::barrier, 0));
  scratch_.resize(std::max<size_t>(scratch_.size(), size_t(channel_->size)));
  std::fill_n(scratch_.begin(), channel_->size, uint8_t(0));
  gather_doubling(scratch_.data(), 1, call);
}

}  // namespace ckdist
