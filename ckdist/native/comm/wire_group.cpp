#include "comm/wire_group.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/waiting.h"
#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kPageFloats = 1024;
constexpr int64_t kYieldNs = 1'000'000;       // a rank in a step yields this long before it sleeps
constexpr int64_t kNapNs = 1'000'000;         // then so, at most, between two looks
constexpr int64_t kPatienceNs = 2'000'000;    // a rank without work looks as often for so long
constexpr int64_t kIdleNs = 50'000'000;       // then so
constexpr int64_t kLongIdleNs = 200'000'000;  // and so once it has had nothing to do for so long
constexpr int64_t kCheckNs = 100'000'000;     // between two looks at who lives
constexpr int64_t kSpinNs = 10;  // a poll of a flag takes about so long; a wire's take from ten to fifty times that

int64_t padded(int64_t floats) { return (floats + kPageFloats - 1) / kPageFloats * kPageFloats; }
int64_t cut(int64_t floats, int i, int count) { return floats * i / count; }

}  // namespace

WireGroup::WireGroup(const std::string& path, Settings s) : WireGroup(path, s, Order(s.host_of)) {}

WireGroup::WireGroup(const std::string& path, Settings& s, Order order)
    : Group(s.rank, int(s.host_of.size()), order.index_of(s.rank), int(order.hosts()[order.host_of(s.rank)].size())),
      order_(std::move(order)),
      host_(order_.host_of(rank)),
      index_(order_.index_of(rank)),
      hosts_(int(order_.hosts().size())),
      direct_bytes_(s.direct_bytes),
      leaders_bytes_(s.leaders_bytes),
      spin_ns_(s.spins * kSpinNs),
      timeout_ns_(int64_t(s.timeout_s * 1e9)),
      // Who waits for a rank that itself waits for another gives it time to say so: the message then names the one that
      // is lost.
      grace_ns_(std::clamp<int64_t>(timeout_ns_ / 10, 250'000'000, 500'000'000)),
      wire_(std::move(s.wire)),
      pulse_(rank, size, nullptr, {}, wire_, s.timeout_s),
      local_(path, index_, order_.hosts()[host_], s.spins, s.timeout_s),
      transport_(*wire_->transport) {
  pulse_.join();
  local_.watch(&pulse_);
  owners_ = size;
  for (const auto& host : order_.hosts()) owners_ = std::min(owners_, int(host.size()));
}

WireGroup::~WireGroup() {
  pulse_.leave();
  Turn turn(*wire_);
  if (known_) transport_.forget_memory(known_);
}

void WireGroup::reserve(const GroupSizes& sizes) {
  sizes_ = sizes;
  const int local = local_.size;
  const bool large = hosts_ > 2;
  padded_ = padded(sizes.partial_floats);
  kept_floats_ = large ? padded(std::min(sizes.partial_floats, direct_bytes_ / 4)) : padded_;
  slice_floats_ = padded(sizes.partial_floats / owners_ / hosts_ + 2);
  const int64_t slot = padded_ * local + kept_floats_ * hosts_ + (large ? padded_ : 0);
  const int64_t slices = large ? slice_floats_ * hosts_ * local : 0, folded = large && local > 1 ? padded_ : 0;
  const int64_t logits = padded(sizes.logit_rows * sizes.vocab), floats = kSlots * slot + slices + folded + logits;
  float* at = reinterpret_cast<float*>(local_.share((floats + padded(sizes.message_ints)) * 4, sizes.message_ints));
  if (over_wire([&] { return transport_.register_memory(at, floats * 4); })) known_ = at;
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  for (int s = 0; s < kSlots; s++)
    part_[s] = take(padded_ * local), sums_[s] = take(kept_floats_ * hosts_), total_[s] = take(large ? padded_ : 0);
  slices_ = take(slices) + (large ? slice_floats_ * hosts_ * index_ : 0);
  folded_ = take(folded);
  logits_ = take(logits);
  for (int s = 0; s < kSlots; s++) std::memset(partial(s), 0, padded_ * 4);  // first touch by the owner
  received_.resize(sizes.message_ints);
  pending_.reserve(size * (kRowsAtOnce + 4));

  shares_.assign(size, {sizes.first_column, sizes.columns});
  for (int r = 1; rank == 0 && r < size; r++)
    if (order_.host_of(r) != 0) receive(r, kTagShare, &shares_[r], sizeof(Share));
  if (host_ != 0) send(0, kTagShare, &shares_[rank], sizeof(Share));
  wait();
  for (int r = 0; rank == 0 && r < size; r++) {
    const auto [first, columns] = shares_[r];
    if (first < 0 || columns < 0 || first > sizes.vocab || columns > sizes.vocab - first)
      fail(Status::comm, "rank %d has logits [%lld, %lld) of %lld", r, (long long)first, (long long)(first + columns),
           (long long)sizes.vocab);
  }
  local_.meet(kStart, 2 * grace_ns_);
  step_ = kBetween;
}

template <class Call>
auto WireGroup::over_wire(Call&& call) -> decltype(call()) {
  try {
    Turn turn(*wire_);
    return call();
  } catch (const Error& error) { fail(error.status(), "%.400s (%s)", error.what(), at_or_before(step_).text); }
}

void WireGroup::send(int peer, int tag, const void* data, int64_t bytes) {
  if (bytes > 0) pending_.push_back({over_wire([&] { return transport_.isend(peer, tag, data, bytes); }), peer});
}

void WireGroup::receive(int peer, int tag, void* data, int64_t bytes) {
  if (bytes > 0) pending_.push_back({over_wire([&] { return transport_.irecv(peer, tag, data, bytes); }), peer});
}

// Requests are waited for in their order: a transport moves all of them, whichever is asked about.
void WireGroup::wait() {
  Waited waited;
  bool slow = false;
  for (size_t i = 0; i < pending_.size(); i++) {
    while (!over_wire([&] { return transport_.test(pending_[i].request); })) {
      const int64_t ns = waited.ns();
      if (ns < spin_ns_) continue;
      if (ns > timeout_ns_ + grace_ns_) give_up(i);
      if (ns < kYieldNs) {
        sched_yield();
        continue;
      }
      if (ns > timeout_ns_ / 2) pulse_.wait_for(pending_[i].peer), slow = true;
      idle(kNapNs);
    }
  }
  if (slow) pulse_.wait_for(-1);
  pending_.clear();
}

void WireGroup::idle(int64_t ns) {
  check_pulse();
  over_wire([&] { transport_.idle(ns); });
}

void WireGroup::check_pulse() {
  if (pulse_.lost()) fail(Status::comm, "%.400s (%s)", pulse_.reason(), at_or_before(step_).text);
}

void WireGroup::leave() { pulse_.leave(); }

// Names every rank that owes something, or whom it waits for itself.
void WireGroup::give_up(size_t first) {
  std::string ranks;
  std::vector<bool> named(size);
  int count = 0;
  for (size_t i = first; i < pending_.size(); i++) {
    const int peer = pulse_.blame(pending_[i].peer);
    if (named[peer] || (i > first && over_wire([&] { return transport_.test(pending_[i].request); }))) continue;
    named[peer] = true;
    ranks += (count++ ? ", " : "") + std::to_string(peer);
  }
  fail(Status::comm, "%s %.200s did not reach %s within %.0f s", count > 1 ? "one of ranks" : "rank", ranks.c_str(),
       place(step_).text, timeout_ns_ / 1e9);
}

void WireGroup::publish(const int32_t* message, int64_t ints) {
  if (ints > sizes_.message_ints)
    fail(Status::native, "message of %lld ints is larger than the %lld reserved", (long long)ints,
         (long long)sizes_.message_ints);
  step_ = 0;
  const int64_t first = std::min(ints, kFrameInts - 1);
  frame_[0] = int32_t(ints);
  if (ints) std::memcpy(frame_ + 1, message, first * 4);
  local_.publish(message, ints);
  for (int h = 1; h < hosts_; h++) {
    send(leader(h), kTagFrame, frame_, sizeof frame_);
    send(leader(h), kTagBody, message + first, (ints - first) * 4);
  }
  wait();
}

// The first rank of a host hears from rank 0, the others from it.
const int32_t* WireGroup::receive(int64_t* ints) {
  if (index_ != 0) return local_.receive(ints);
  wait_for_message();
  step_ = 0;
  *ints = frame_[0];
  if (*ints < 0 || *ints > sizes_.message_ints)
    fail(Status::comm, "rank 0 announced a message of %d ints; at most %lld are taken", frame_[0],
         (long long)sizes_.message_ints);
  const int64_t first = std::min(*ints, kFrameInts - 1);
  std::memcpy(received_.data(), frame_ + 1, first * 4);
  receive(0, kTagBody, received_.data() + first, (*ints - first) * 4);
  wait();
  local_.publish(received_.data(), *ints);
  return received_.data();
}

void WireGroup::wait_for_message() {
  const Transport::Request request = over_wire([&] { return transport_.irecv(0, kTagFrame, frame_, sizeof frame_); });
  Waited waited;
  int64_t checked = 0;
  while (!over_wire([&] { return transport_.test(request); })) {
    const int64_t ns = waited.ns();
    if (ns < spin_ns_) continue;
    if (ns - checked > kCheckNs) local_.check(), checked = ns;
    idle(ns < kPatienceNs ? kNapNs : ns < kLongIdleNs ? kIdleNs : kLongIdleNs);
  }
}

float* WireGroup::sum(int slot, int host) const {
  return host == host_ && local_.size == 1 ? part(slot, 0) : sums_[slot] + host * kept_floats_;
}

void WireGroup::peers(int slot, const float** out) {
  for (int i = 0; i < local_.size; i++) out[i] = part(slot, i);
}

void WireGroup::exchange(int step, Idle idle) {
  step_ = step;
  local_.meet(step, 2 * grace_ns_, idle);
}

float* WireGroup::host_partial(int slot, int64_t floats) {
  if (local_.size == 1) return part(slot, 0);
  return large(floats) ? folded_ : sum(slot, host_);
}

void WireGroup::sum_hosts(int slot, int64_t floats, int step, Idle idle, bool folded) {
  step_ = step;
  whole_[slot] = large(floats);
  const int owners = floats * 4 <= leaders_bytes_ ? 1 : owners_;
  const bool owner = index_ < owners;
  const int64_t begin = cut(floats, index_, owners), end = cut(floats, index_ + 1, owners);
  const auto twin = [&](int h) { return order_.hosts()[h][index_]; };
  // All ranks of this host are in the exchange before this one or in this one, so nobody reads what the slot held two
  // before.
  for (int k = 1; owner && !whole_[slot] && k < hosts_; k++) {
    const int h = (host_ + k) % hosts_;
    receive(twin(h), kTagSum, sum(slot, h) + begin, (end - begin) * 4);
  }
  local_.meet(step, 0, idle);
  if (owner && whole_[slot]) {
    add_sums(slot, begin, end, folded);
  } else if (owner) {
    float* own = sum(slot, host_) + begin;
    if (local_.size > 1 && !folded) fold_own(slot, begin, end, own);
    for (int k = 1; k < hosts_; k++) send(twin((host_ + k) % hosts_), kTagSum, own, (end - begin) * 4);
    wait();
  }
  local_.meet(step, 2 * grace_ns_, idle);
}

// out: of `begin` on, what this host's ranks bring to the value.
void WireGroup::fold_own(int slot, int64_t begin, int64_t end, float* out) {
  const void* parts[kMaxRanks];
  for (int i = 0; i < local_.size; i++) parts[i] = part(slot, i) + begin;
  order_.fold_host(Element::f32, ReduceOp::sum, out, parts, local_.size, end - begin);
}

// Every twin adds one slice of [begin, end) and gives it to the others.
void WireGroup::add_sums(int slot, int64_t begin, int64_t end, bool folded) {
  const auto twin = [&](int k) { return order_.hosts()[(host_ + k) % hosts_][index_]; };
  const auto from = [&](int h) { return begin + cut(end - begin, h, hosts_); };
  const auto bytes = [&](int h) { return (from(h + 1) - from(h)) * 4; };
  const auto host = [&](int k) { return (host_ + k) % hosts_; };
  for (int k = 1; k < hosts_; k++) receive(twin(k), kTagTotal, total_[slot] + from(host(k)), bytes(host(k)));
  std::swap(pending_, later_);  // the twins cannot send these before they have this host's slice
  for (int k = 1; k < hosts_; k++) receive(twin(k), kTagSlice, slices_ + host(k) * slice_floats_, bytes(host_));
  const float* own = local_.size > 1 ? folded_ : part(slot, 0);
  if (local_.size > 1 && !folded) fold_own(slot, begin, end, folded_ + begin);
  for (int k = 1; k < hosts_; k++) send(twin(k), kTagSlice, own + from(host(k)), bytes(host(k)));
  wait();
  const void* sums[kMaxRanks];
  for (int h = 0; h < hosts_; h++) sums[h] = h == host_ ? own + from(h) : slices_ + h * slice_floats_;
  void* out = total_[slot] + from(host_);
  order_.fold_hosts(Element::f32, ReduceOp::sum, &out, 1, sums, from(host_ + 1) - from(host_));
  std::swap(pending_, later_);
  for (int k = 1; k < hosts_; k++) send(twin(k), kTagTotal, out, bytes(host_));
  wait();
}

int WireGroup::parts(int slot, const float** out) {
  if (whole_[slot]) return out[0] = total_[slot], 1;
  for (int h = 0; h < hosts_; h++) out[h] = sum(slot, h);
  return hosts_;
}

float* WireGroup::logits(int64_t* stride) {
  *stride = sizes_.vocab;
  return logits_ + sizes_.first_column;
}

// Row by row, straight into place: no rank needs a second copy of the logits.
void WireGroup::gather(int64_t rows, int step) {
  step_ = step;
  local_.meet(step);  // also: this host's ranks have read all values of this step
  for (int64_t begin = 0; begin < rows; begin += kRowsAtOnce) {
    for (int64_t t = begin; t < std::min(rows, begin + kRowsAtOnce); t++) {
      float* row = logits_ + t * sizes_.vocab;
      if (host_ != 0) send(0, kTagLogits, row + sizes_.first_column, sizes_.columns * 4);
      for (int r = 1; rank == 0 && r < size; r++)
        if (order_.host_of(r) != 0) receive(r, kTagLogits, row + shares_[r].first, shares_[r].columns * 4);
    }
    wait();
  }
  step_ = kBetween;
}

void WireGroup::check_peers() {
  local_.check();
  check_pulse();
}

void WireGroup::abandon(const char* reason) {
  pulse_.give_up(reason);
  local_.abandon(reason);
  Turn turn(*wire_);
  transport_.abandon(reason);
}

}  // namespace ckdist
