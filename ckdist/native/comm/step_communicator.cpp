#include "comm/step_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kPageFloats = 1024;
constexpr int64_t kBusyIdleNs = 1'000'000;    // poll interval of a rank without work
constexpr int64_t kBusyNs = 2'000'000;        // for this long
constexpr int64_t kIdleNs = 50'000'000;       // poll interval after kBusyNs
constexpr int64_t kLongIdleNs = 200'000'000;  // poll interval after kLongIdleNs without work

int64_t round_up(int64_t floats, int64_t unit) { return (floats + unit - 1) / unit * unit; }
int64_t padded(int64_t floats) { return round_up(floats, kPageFloats); }
// Floats of a slot, padded: whole huge pages per rank if its slots fill at least one.
int64_t padded_slot(int64_t floats) {
  constexpr int64_t unit = Segment::kHugePage / 4 / kSlots;
  return floats < unit ? padded(floats) : round_up(floats, unit);
}
int64_t slice_begin(int64_t floats, int i, int count) { return floats * i / count; }

// Bytes of rows that one rank of a host passes to the others: its part of the other hosts' rows, or of the host's own.
int64_t rows_bytes(const StepSizes& sizes, int hosts, int local) {
  return (sizes.rows / local + 2 * hosts) * sizes.row_bytes;
}

}  // namespace

struct StepCommunicator::Mailbox {
  alignas(64) ShmFlag batches;  // number of published batches
  struct alignas(64) Taken : ShmFlag {};
  static int64_t bytes(int ranks, const StepSizes& sizes) {
    return int64_t(sizeof(Mailbox)) + ranks * int64_t(sizeof(Taken)) + sizes.batches * (1 + sizes.batch_ints) * 4;
  }
  Taken& taken(int i) { return reinterpret_cast<Taken*>(this + 1)[i]; }
  // A ring of batches: the length, then the batch.
  int32_t* batch(int ranks, uint32_t number, const StepSizes& sizes) {
    return reinterpret_cast<int32_t*>(&taken(ranks)) + number % sizes.batches * (1 + sizes.batch_ints);
  }
};

struct StepCommunicator::Layout {
  int64_t value, kept, slice;  // floats of a value; of a value that every host keeps; of one rank's slice
  int64_t partials, sums, totals, slices, folded, logits, counters, rows, mailbox;
  int64_t floats() const { return partials + sums + totals + slices + folded + logits; }  // that the transport moves

  Layout(const Order& order, int rank, const Thresholds& thresholds, const StepSizes& sizes) {
    const int hosts = int(order.hosts().size()), local = int(order.hosts()[order.host_of(rank)].size());
    const bool several = hosts > 1, many = hosts > 2;
    value = padded_slot(sizes.partial_floats);
    kept = many ? padded(std::min(sizes.partial_floats, thresholds.transport_direct_bytes / 4)) : several ? value : 0;
    slice = many ? padded(sizes.partial_floats / order.smallest_host() / hosts + 2 * kMaxChunks) : 0;
    partials = local * kSlots * value;
    sums = kSlots * hosts * kept;
    totals = many ? kSlots * value : 0;
    slices = local * hosts * slice;
    folded = many && local > 1 ? value : 0;
    logits = padded(sizes.logit_rows * sizes.vocab);
    counters = padded(local * sizes.counters * 2);
    rows = several && local > 1 ? padded(2 * local * rows_bytes(sizes, hosts, local) / 4) : 0;
    mailbox = padded(Mailbox::bytes(local, sizes) / 4 + 1);
  }
};

int64_t StepCommunicator::memory_bytes(const Order& order, int rank, const Thresholds& thresholds,
                                       const StepSizes& sizes) {
  const Layout layout(order, rank, thresholds, sizes);
  return (layout.floats() + layout.counters + layout.rows + layout.mailbox) * 4;
}

StepCommunicator::StepCommunicator(Parts parts, Segment memory, const StepSizes& sizes)
    : rank(parts.rank),
      size(parts.order.size()),
      local_rank(parts.order.index_of(rank)),
      local_size(int(parts.order.hosts()[parts.order.host_of(rank)].size())),
      parts_(std::move(parts)),
      host_(parts_.order.host_of(rank)),
      host_count_(int(hosts().size())),
      leaders_(parts_.order.smallest_host()),
      grace_ns_(host_count_ > 1 ? 2 * peer_grace_ns(parts_.channel->timeout_ns()) : 0),
      memory_(std::move(memory)),
      sizes_(sizes),
      batch_(size_t(std::max(kHeadInts, 1 + sizes.batch_ints))) {
  if (sizes.batches < 1) fail(Status::native, "%lld batches; at least one is published", (long long)sizes.batches);
  if (rank == 0 && host_count_ > 1) outgoing_.assign(size_t(sizes.batches), {batch_, {}});
  for (int r = 0; r < size; r++) {
    const auto [first, count] = parts_.columns[r];
    if (first < 0 || count < 0 || first > sizes.vocab || count > sizes.vocab - first)
      fail(Status::comm, "rank %d has logits [%lld, %lld) of %lld", r, (long long)first, (long long)(first + count),
           (long long)sizes.vocab);
  }
  const Layout layout(parts_.order, rank, parts_.thresholds, sizes);
  padded_ = layout.value, kept_floats_ = layout.kept, slice_floats_ = layout.slice;
  float* at = reinterpret_cast<float*>(memory_.data());
  const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
  partials_ = take(layout.partials);
  for (float*& sums : sums_) sums = take(layout.sums / kSlots);
  for (float*& total : total_) total = take(layout.totals / kSlots);
  slices_ = take(layout.slices) + local_rank * host_count_ * slice_floats_;
  folded_ = take(layout.folded);
  logits_ = take(layout.logits);
  counters_ = reinterpret_cast<int64_t*>(take(layout.counters));
  rows_ = reinterpret_cast<uint8_t*>(take(layout.rows));
  rows_bytes_ = rows_bytes(sizes, host_count_, local_size);
  mailbox_ = reinterpret_cast<Mailbox*>(at);
  const int64_t sent_bytes = (layout.floats() + layout.counters + layout.rows) * 4;  // 0 if only commands are sent
  registered_.base = memory_.data();
  if (host_count_ > 1 && sent_bytes > 0 && parts_.channel->register_memory(memory_.data(), sent_bytes))
    registered_.channel = parts_.channel.get();
  std::memset(partial(0), 0, size_t(kSlots * padded_ * 4));  // first touch by the owner
  Segment::collapse(reinterpret_cast<uint8_t*>(partial(0)), kSlots * padded_ * 4);
  pending_.reserve(size_t(size) * (kRowsAtOnce + 4));
  for (Chunk& chunk : chunks_)
    chunk.sums.reserve(size_t(2 * host_count_)), chunk.totals.reserve(size_t(2 * host_count_));
  meet(kStart, grace_ns_, {});
  step_ = kBetween;
}

CallName StepCommunicator::call() const {
  if (step_ == kStart) return {"the start of steps"};
  if (step_ == kBetween) return {"the wait for a batch"};
  return {"step", step_};
}

void StepCommunicator::meet(int step, int64_t grace_ns, Idle idle) {
  step_ = step;
  if (!parts_.rendezvous) return;
  parts_.rendezvous->name_call(call());
  parts_.rendezvous->barrier(grace_ns, idle);
}

void StepCommunicator::begin_send(Messages& messages, int peer, Tag tag, const void* data, int64_t bytes) {
  if (bytes <= 0) return;
  sent_ += bytes;
  messages.push_back(parts_.channel->isend(peer, tag, data, bytes));
}

void StepCommunicator::begin_receive(Messages& messages, int peer, Tag tag, void* data, int64_t bytes) {
  if (bytes > 0) messages.push_back(parts_.channel->irecv(peer, tag, data, bytes));
}

void StepCommunicator::wait() { parts_.channel->wait(pending_, call()); }

void StepCommunicator::publish(const int32_t* batch, int64_t ints, bool last) {
  if (ints > sizes_.batch_ints)
    fail(Status::native, "a batch of %lld ints is larger than the %lld reserved", (long long)ints,
         (long long)sizes_.batch_ints);
  step_ = 0;
  if (host_count_ > 1) {
    Outgoing& out = outgoing_[batches_ % outgoing_.size()];
    out.ints[0] = int32_t(ints);
    if (ints) std::memcpy(&out.ints[1], batch, size_t(ints * 4));
    for (int h = 1; h < host_count_; h++) {
      out.messages.push_back(parts_.channel->isend(leader(h), kHead, out.ints.data(), kHeadInts * 4));
      if (const int64_t more = 1 + ints - kHeadInts; more > 0)
        out.messages.push_back(parts_.channel->isend(leader(h), kBody, &out.ints[kHeadInts], more * 4));
    }
  }
  put_into_mailbox(batch, ints);
  // The next batch replaces the oldest one.
  const size_t count = outgoing_.size(), awaited = last ? count : std::min<size_t>(count, 1);
  for (size_t i = 0; i < awaited; i++) parts_.channel->wait(outgoing_[(batches_ + i) % count].messages, call());
}

// A host's leader receives from rank 0; the other ranks receive from the leader.
const int32_t* StepCommunicator::receive(int64_t* ints, const std::function<bool()>& progress) {
  if (local_rank != 0) return take_from_mailbox(ints, progress);
  wait_for_batch();
  step_ = 0;
  *ints = batch_[0];
  if (*ints < 0 || *ints > sizes_.batch_ints)
    fail(Status::comm, "rank 0 announced a batch of %d ints; at most %lld are taken", batch_[0],
         (long long)sizes_.batch_ints);
  begin_receive(pending_, 0, kBody, batch_.data() + kHeadInts, (1 + *ints - kHeadInts) * 4);
  wait();
  put_into_mailbox(&batch_[1], *ints);
  return &batch_[1];
}

void StepCommunicator::put_into_mailbox(const int32_t* batch, int64_t ints) {
  const uint32_t number = batches_++;
  if (local_size == 1) return;
  for (int i = 1; i < local_size; i++)  // waits for the slowest reader
    parts_.rendezvous->await(mailbox_->taken(i), batches_ - uint32_t(sizes_.batches), i);
  int32_t* const place = mailbox_->batch(local_size, number, sizes_);
  place[0] = int32_t(ints);
  if (ints) std::memcpy(place + 1, batch, size_t(ints * 4));
  mailbox_->batches.set(batches_);
}

const int32_t* StepCommunicator::take_from_mailbox(int64_t* ints, const std::function<bool()>& progress) {
  step_ = kBetween;
  parts_.rendezvous->name_call(call());
  batches_++;
  // Waiting in the rendezvous makes no progress on the transport.
  while (progress && !mailbox_->batches.reached(batches_) && progress()) parts_.channel->idle(kBusyIdleNs, call());
  parts_.rendezvous->await(mailbox_->batches, batches_, 0, ShmRendezvous::kForever);
  step_ = 0;
  const int32_t* const place = mailbox_->batch(local_size, batches_ - 1, sizes_);
  *ints = place[0];
  std::memcpy(batch_.data(), place + 1, size_t(*ints * 4));
  mailbox_->taken(local_rank).set(batches_);
  return batch_.data();
}

void StepCommunicator::wait_for_batch() {
  Channel& channel = *parts_.channel;
  step_ = kBetween;
  Channel::Pending head = channel.irecv(0, kHead, batch_.data(), kHeadInts * 4);
  Waited waited;
  while (!channel.test(head)) {
    const int64_t ns = waited.ns();
    if (ns < channel.patience().spin_ns) continue;
    channel.idle(ns < kBusyNs ? kBusyIdleNs : ns < kLongIdleNs ? kIdleNs : kLongIdleNs, call());
  }
}

float* StepCommunicator::sum(int slot, int host) const {
  return host == host_ && local_size == 1 ? part(slot, 0) : sums_[slot] + host * kept_floats_;
}

bool StepCommunicator::large(int64_t floats) const {
  return host_count_ > 2 && floats * 4 > parts_.thresholds.transport_direct_bytes;
}

void StepCommunicator::peers(int slot, const float** out) const {
  for (int i = 0; i < local_size; i++) out[i] = part(slot, i);
}

int StepCommunicator::summands(int slot, const float** out) const {
  if (host_count_ == 1) return peers(slot, out), local_size;
  if (reduced_[slot]) return out[0] = total_[slot], 1;
  for (int h = 0; h < host_count_; h++) out[h] = sum(slot, h);
  return host_count_;
}

void StepCommunicator::all_reduce(int slot, int64_t floats, int step, Idle idle) {
  if (host_count_ == 1) return meet(step, 0, idle);
  begin_chunk({slot, floats, false}, {0, floats}, step, idle);
  wait_chunks(step, idle);
}

float* StepCommunicator::host_partial(int slot, int64_t floats) {
  if (host_count_ == 1) fail(Status::native, "one host has no values that are partial over hosts");
  return host_sum(slot, large(floats));
}

float* StepCommunicator::host_sum(int slot, bool in_slices) const {
  if (local_size == 1) return part(slot, 0);
  return in_slices ? folded_ : sum(slot, host_);
}

Range StepCommunicator::slice_of(const Chunk& chunk, int host) const {
  const int64_t floats = chunk.floats.end - chunk.floats.begin;
  return {chunk.floats.begin + slice_begin(floats, host, host_count_),
          chunk.floats.begin + slice_begin(floats, host + 1, host_count_)};
}

void StepCommunicator::begin_chunk(const HostSum& of, Range range, int step, Idle idle) {
  if (begun_ == kMaxChunks) fail(Status::native, "a sum of more than %d chunks", kMaxChunks);
  Chunk& chunk = chunks_[begun_++];
  const int slot = of.slot, leaders = of.floats * 4 <= parts_.thresholds.leaders_bytes ? 1 : leaders_;
  const bool leads = of.by_rank || local_rank < leaders, in_slices = reduced_[slot] = large(of.floats);
  chunk.slot = slot, chunk.floats = range;
  if (!of.by_rank && leads) {
    const int64_t floats = range.end - range.begin;
    chunk.floats = {range.begin + slice_begin(floats, local_rank, leaders),
                    range.begin + slice_begin(floats, local_rank + 1, leaders)};
  }
  const auto [begin, end] = chunk.floats;
  const auto bytes = [&](int host) { return (slice_of(chunk, host).end - slice_of(chunk, host).begin) * 4; };
  chunk.slices = leads && in_slices ? slices_ + slices_used_ : nullptr;
  if (chunk.slices) slices_used_ += bytes(host_) / 4;
  // All ranks of this host are in this exchange or in the one before. So no rank reads the slot's value from two
  // exchanges before.
  for (int k = 1; leads && k < host_count_; k++) {
    const int peer = same_place(other(k));
    if (!in_slices) {
      begin_receive(chunk.sums, peer, kSum, sum(slot, other(k)) + begin, (end - begin) * 4);
      continue;
    }
    begin_receive(chunk.totals, peer, kTotal, total_[slot] + slice_of(chunk, other(k)).begin, bytes(other(k)));
    begin_receive(chunk.sums, peer, kSlice, chunk.slices + other(k) * slice_floats_, bytes(host_));
  }
  if (of.by_rank) step_ = step;
  else meet(step, 0, idle);
  if (!leads) return;
  float* const own = host_sum(slot, in_slices);
  if (local_size > 1 && !of.by_rank) fold_local(slot, begin, end, own + begin);
  for (int k = 1; k < host_count_; k++) {
    const int peer = same_place(other(k));
    if (!in_slices) begin_send(chunk.sums, peer, kSum, own + begin, (end - begin) * 4);
    else begin_send(chunk.sums, peer, kSlice, own + slice_of(chunk, other(k)).begin, bytes(other(k)));
  }
}

// Adds this host's slice of a chunk after all summands have arrived, and begins to send the total to the other hosts.
void StepCommunicator::add_slices(Chunk& chunk) {
  const auto [begin, end] = slice_of(chunk, host_);
  const void* sums[kMaxRanks];
  for (int h = 0; h < host_count_; h++)
    sums[h] = h == host_ ? host_sum(chunk.slot, true) + begin : chunk.slices + h * slice_floats_;
  void* out = total_[chunk.slot] + begin;
  parts_.order.fold_hosts(Element::f32, ReduceOp::sum, &out, 1, sums, end - begin);
  chunk.slices = nullptr;
  for (int k = 1; k < host_count_; k++) begin_send(chunk.totals, same_place(other(k)), kTotal, out, (end - begin) * 4);
}

bool StepCommunicator::test(Messages& messages) {
  return std::all_of(messages.begin(), messages.end(),
                     [&](Channel::Pending& message) { return parts_.channel->test(message); });
}

int StepCommunicator::test_chunks() {
  for (; arrived_ < begun_; arrived_++) {
    Chunk& chunk = chunks_[arrived_];
    if (!test(chunk.sums)) break;
    if (chunk.slices) add_slices(chunk);
    if (!test(chunk.totals)) break;
  }
  return arrived_;
}

void StepCommunicator::wait_chunks(int step, Idle idle) {
  step_ = step;
  for (Chunk* chunk = chunks_; chunk < chunks_ + begun_; chunk++) {
    parts_.channel->wait(chunk->sums, call());
    if (chunk->slices) add_slices(*chunk);
  }
  for (Chunk* chunk = chunks_; chunk < chunks_ + begun_; chunk++) parts_.channel->wait(chunk->totals, call());
  begun_ = arrived_ = 0, slices_used_ = 0;
  meet(step, grace_ns_, idle);
}

void StepCommunicator::fold_local(int slot, int64_t begin, int64_t end, float* out) const {
  const void* parts[kMaxRanks];
  for (int i = 0; i < local_size; i++) parts[i] = part(slot, i) + begin;
  parts_.order.fold_host(Element::f32, ReduceOp::sum, out, parts, local_size, end - begin);
}

void StepCommunicator::fold_hosts(float* out, const float* const* parts, int64_t floats) const {
  const void* of_hosts[kMaxRanks];
  for (int h = 0; h < host_count_; h++) of_hosts[h] = parts[h];
  void* const to = out;
  parts_.order.fold_hosts(Element::f32, ReduceOp::sum, &to, 1, of_hosts, floats);
}

float* StepCommunicator::logits(int64_t* stride) {
  *stride = sizes_.vocab;
  return logits_ + sizes_.first_column;
}

// Row by row, directly to the destination: no rank needs a second copy of the logits.
void StepCommunicator::gather_logits(int64_t rows, int step) {
  meet(step, 0, {});  // also: this host's ranks have read all values of this step
  for (int64_t begin = 0; host_count_ > 1 && begin < rows; begin += kRowsAtOnce) {
    for (int64_t t = begin; t < std::min(rows, begin + kRowsAtOnce); t++) {
      float* row = logits_ + t * sizes_.vocab;
      if (host_ != 0) begin_send(pending_, 0, kLogits, row + sizes_.first_column, sizes_.columns * 4);
      for (int r = 1; rank == 0 && r < size; r++)
        if (parts_.order.host_of(r) != 0)
          begin_receive(pending_, r, kLogits, row + parts_.columns[r].first, parts_.columns[r].count * 4);
    }
    wait();
  }
  step_ = kBetween;
}

Channel::Pending StepCommunicator::isend(int peer, const void* data, int64_t bytes) {
  if (parts_.order.host_of(peer) != host_) sent_ += bytes;
  return parts_.channel->isend(peer, kMessage, data, bytes);
}

Channel::Pending StepCommunicator::irecv(int peer, void* data, int64_t bytes) {
  return parts_.channel->irecv(peer, kMessage, data, bytes);
}

void StepCommunicator::wait(Channel::Pending& message, int step) {
  step_ = step;
  parts_.channel->wait(message, call());
}

void StepCommunicator::send(int peer, const void* data, int64_t bytes, int step) {
  Channel::Pending message = isend(peer, data, bytes);
  wait(message, step);
}

void StepCommunicator::recv(int peer, void* data, int64_t bytes, int step) {
  Channel::Pending message = irecv(peer, data, bytes);
  wait(message, step);
}

}  // namespace ckdist
