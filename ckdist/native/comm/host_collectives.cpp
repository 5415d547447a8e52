#include "comm/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/signature.h"
#include "core/error.h"
#include "core/futex.h"
#include "kernels/kernels.h"

namespace ckdist {

namespace {

constexpr int64_t kSlot = Meeting::kSlotBytes;
constexpr int64_t kLine = 64;
constexpr int64_t kStreamable = 4 << 10;  // below, streaming stores never win
constexpr int64_t kTrialEvery = 256, kTrials = 8;  // calls; kTrialEvery is even, so that trials take turns
constexpr int kFewRanks = 3;               // up to so many, reading everything beats a second meeting

// Rank i's slice of n elements, cut at cache lines where it can be.
struct Slice {
  int64_t begin, end;
  Slice(int64_t n, int i, int size, int64_t element) {
    const int64_t unit = kLine / element, units = n / unit;
    begin = i ? units * i / size * unit : 0;
    end = i + 1 < size ? units * (i + 1) / size * unit : n;
  }
};

int64_t sum_before(const int64_t* counts, int i) { return std::accumulate(counts, counts + i, int64_t(0)); }

}  // namespace

bool HostCollectives::Probe::begin() {
  const int64_t phase = calls++ % kTrialEvery;
  if (phase == 0) cached_ns = streamed_ns = 1e30;
  start = phase < kTrials ? now_ns() : 0;
  if (start) return phase % 2;
  return streamed_ns < cached_ns;
}

void HostCollectives::Probe::end(int64_t bytes) {
  if (!start) return;
  double& best = (calls - 1) % 2 ? streamed_ns : cached_ns;
  best = std::min(best, double(now_ns() - start) / double(bytes));
}

HostCollectives::HostCollectives(Meeting& meeting, std::shared_ptr<HostMemory> memory, std::vector<int> arenas, const Thresholds& thresholds)
    : meeting_(meeting), memory_(std::move(memory)), arenas_(std::move(arenas)), thresholds_(thresholds), order_(std::vector<int>(meeting.size, 0)),
      parts_(meeting.size), outs_(meeting.size) {
  thresholds_.direct_bytes = std::min(thresholds_.direct_bytes, kSlot);
}

void HostCollectives::copy(void* to, const void* from, int64_t bytes, bool stream) {
  if (to != from && bytes > 0) kernels().reduce.copy(to, from, bytes, stream);
}

bool HostCollectives::all_placed(uint32_t epoch, bool outs) const {
  for (int i = 0; i < meeting_.size; i++)
    if (meeting_.record(i, epoch).in < 0 || (outs && meeting_.record(i, epoch).out < 0)) return false;
  return true;
}

void HostCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  meeting_.begin("all_reduce");
  const int size = meeting_.size;
  const int64_t bytes = n * element_bytes(e);
  const uint64_t call = signature(Call::reduce, n, reduction(e, op));
  const uint32_t epoch = meeting_.next();
  if (bytes <= thresholds_.direct_bytes) {
    if (bytes) std::memcpy(meeting_.slot(meeting_.index, epoch), in, size_t(bytes));
    meeting_.post({-1, -1, call});
    meeting_.await(epoch);
    for (int i = 0; i < size; i++) parts_[i] = i == meeting_.index ? in : meeting_.slot(i, epoch);
    order_.fold_ranks(e, op, &out, 1, parts_.data(), n);
    return;
  }
  Meeting::Record own{memory_->offset(in, bytes), memory_->offset(out, bytes), call};
  const bool placed = own.in >= 0 && own.out >= 0;
  if (!placed) own.in = own.out = -1;
  // A rank whose buffers lie elsewhere fills its slot before it says so: where no rank's are placed, that was the first chunk.
  Probe& probe = (placed ? placed_ : staged_)[63 - __builtin_clzll(uint64_t(bytes) | 1)];
  streaming_ = bytes >= kStreamable && probe.begin();
  if (!placed) fill(meeting_.slot(meeting_.index, epoch), in, std::min(bytes, kSlot));
  meeting_.post(own);
  meeting_.await(epoch);
  if (all_placed(epoch, true)) {
    reduce_in_place(epoch, n, e, op);
  } else {
    uint32_t first = epoch;
    for (int i = 0; i < size; i++)
      if (meeting_.record(i, epoch).in >= 0) first = 0;  // its slot is not filled: once more, with everyone's
    if (!first) {
      first = meeting_.next();
      fill(meeting_.slot(meeting_.index, first), in, std::min(bytes, kSlot));
      meeting_.post({-1, -1, call});
      meeting_.await(first);
    }
    const auto reduce = size <= kFewRanks ? &HostCollectives::reduce_staged : &HostCollectives::reduce_staged_slices;
    (this->*reduce)(static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), n, e, op, first);
  }
  if (bytes >= kStreamable) probe.end(bytes);
}

// Every rank folds its slice from all ranks' buffers and writes it to all of them: no slice has two writers, nor a reader beside its writer.
void HostCollectives::reduce_in_place(uint32_t epoch, int64_t n, Element e, ReduceOp op) {
  const int64_t element = element_bytes(e);
  const Slice mine(n, meeting_.index, meeting_.size, element);
  for (int i = 0; i < meeting_.size; i++) {
    parts_[i] = peer_in(i, epoch) + mine.begin * element;
    outs_[i] = peer_out(i, epoch) + mine.begin * element;
  }
  order_.fold_ranks(e, op, outs_.data(), meeting_.size, parts_.data(), mine.end - mine.begin, streaming_);
  meeting_.meet();
}

// Every rank stages chunk after chunk, one ahead of what it folds, and folds all of each chunk for itself.
void HostCollectives::reduce_staged(const uint8_t* in, uint8_t* out, int64_t n, Element e, ReduceOp op, uint32_t first) {
  const int64_t element = element_bytes(e), bytes = n * element, chunks = (bytes + kSlot - 1) / kSlot;
  const uint64_t call = meeting_.record(meeting_.index, first).signature;
  for (int64_t c = 0; c < chunks; c++) {
    const uint32_t epoch = first + uint32_t(c);
    if (c) meeting_.await(epoch);
    if (c + 1 < chunks) {
      fill(meeting_.slot(meeting_.index, epoch + 1), in + (c + 1) * kSlot, std::min(kSlot, bytes - (c + 1) * kSlot));
      meeting_.post({-1, -1, call});
    }
    for (int i = 0; i < meeting_.size; i++) parts_[i] = i == meeting_.index ? in + c * kSlot : meeting_.slot(i, epoch);
    void* to = out + c * kSlot;
    order_.fold_ranks(e, op, &to, 1, parts_.data(), std::min(kSlot, bytes - c * kSlot) / element);
  }
}

// Every rank folds its slice of the chunk and shows it in its own slot, where the others fetch it.
void HostCollectives::reduce_staged_slices(const uint8_t* in, uint8_t* out, int64_t n, Element e, ReduceOp op, uint32_t first) {
  const int64_t element = element_bytes(e), bytes = n * element;
  const uint64_t call = meeting_.record(meeting_.index, first).signature;
  const int size = meeting_.size, index = meeting_.index;
  uint32_t epoch = first;
  for (int64_t done = 0; done < bytes; done += kSlot) {
    const int64_t m = std::min(kSlot, bytes - done) / element;
    if (done) {
      epoch = meeting_.next();
      fill(meeting_.slot(index, epoch), in + done, m * element);
      meeting_.post({-1, -1, call});
      meeting_.await(epoch);
    }
    const Slice mine(m, index, size, element);
    for (int i = 0; i < size; i++) parts_[i] = meeting_.slot(i, epoch) + mine.begin * element;
    void* to[] = {meeting_.slot(index, epoch) + mine.begin * element, out + done + mine.begin * element};
    order_.fold_ranks(e, op, to, 2, parts_.data(), mine.end - mine.begin);
    meeting_.meet();
    for (int k = 1; k < size; k++) {
      const int i = (index + k) % size;
      const Slice theirs(m, i, size, element);
      copy(out + done + theirs.begin * element, meeting_.slot(i, epoch) + theirs.begin * element, (theirs.end - theirs.begin) * element, false);
    }
  }
}

void HostCollectives::reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) {
  meeting_.begin("reduce_scatter");
  const int size = meeting_.size, index = meeting_.index;
  const int64_t element = element_bytes(e), total = sum_before(counts, size), own_first = sum_before(counts, index);
  const uint64_t call = signature(Call::reduce_scatter, total, reduction(e, op));
  const uint32_t epoch = meeting_.post({memory_->offset(in, total * element), -1, call});
  meeting_.await(epoch);
  if (all_placed(epoch, false)) {
    // `out` may be `in`: what this rank writes there must not be what a peer still reads.
    std::vector<uint8_t> held(in == out ? size_t(counts[index] * element) : 0);
    void* to = in == out ? held.data() : out;
    for (int i = 0; i < size; i++) parts_[i] = peer_in(i, epoch) + own_first * element;
    order_.fold_ranks(e, op, &to, 1, parts_.data(), counts[index]);
    meeting_.meet();
    if (to != out) std::memcpy(out, to, held.size());
    return;
  }
  std::vector<uint8_t> held(in == out ? size_t(counts[index] * element) : 0);
  uint8_t* result = in == out ? held.data() : static_cast<uint8_t*>(out);
  const int64_t cell = kSlot / size / kLine * kLine, per_cell = cell / element, longest = *std::max_element(counts, counts + size);
  for (int64_t done = 0; done < longest; done += per_cell) {
    const auto part = [&](int r) { return std::clamp<int64_t>(counts[r] - done, 0, per_cell); };
    const uint32_t now = meeting_.next();
    for (int r = 0, at = 0; r < size; at += int(cell), r++)
      copy(meeting_.slot(index, now) + at, static_cast<const uint8_t*>(in) + (sum_before(counts, r) + done) * element, part(r) * element, false);
    meeting_.post({-1, -1, call});
    meeting_.await(now);
    for (int i = 0; i < size; i++) parts_[i] = meeting_.slot(i, now) + index * cell;
    void* to = result + done * element;
    order_.fold_ranks(e, op, &to, 1, parts_.data(), part(index));
  }
  if (in == out && !held.empty()) std::memcpy(out, held.data(), held.size());
}

void HostCollectives::all_gather(const void* in, void* out, const int64_t* bytes) {
  meeting_.begin("all_gather");
  const int size = meeting_.size, index = meeting_.index;
  const uint64_t call = signature(Call::gather, sum_before(bytes, size));
  uint8_t* to = static_cast<uint8_t*>(out);
  const uint8_t* from = static_cast<const uint8_t*>(in);
  const int64_t longest = *std::max_element(bytes, bytes + size);
  const uint32_t epoch = meeting_.next();
  const bool small = longest <= kSlot;
  Meeting::Record own{small ? -1 : memory_->offset(in, bytes[index]), -1, call};
  if (own.in < 0) copy(meeting_.slot(index, epoch), in, std::min(kSlot, bytes[index]), false);
  copy(to + sum_before(bytes, index), in, bytes[index], false);
  meeting_.post(own);
  meeting_.await(epoch);
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    const bool placed = meeting_.record(i, epoch).in >= 0;
    copy(to + sum_before(bytes, i), placed ? peer_in(i, epoch) : meeting_.slot(i, epoch), placed ? bytes[i] : std::min(kSlot, bytes[i]), false);
  }
  if (small) return;
  const bool placed = all_placed(epoch, false);
  for (int64_t done = kSlot; done < longest && !placed; done += kSlot) {
    const uint32_t now = meeting_.next();
    if (own.in < 0) copy(meeting_.slot(index, now), from + done, std::clamp<int64_t>(bytes[index] - done, 0, kSlot), false);
    meeting_.post(own);
    meeting_.await(now);
    for (int i = 0; i < size; i++)
      if (i != index && meeting_.record(i, now).in < 0)
        copy(to + sum_before(bytes, i) + done, meeting_.slot(i, now), std::clamp<int64_t>(bytes[i] - done, 0, kSlot), false);
  }
  meeting_.meet();  // peers have read what is theirs to change again
}

void HostCollectives::all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) {
  meeting_.begin("all_to_all");
  const int size = meeting_.size, index = meeting_.index;
  const int64_t table = size * int64_t(sizeof(int64_t)), cell = (kSlot - table) / size / kLine * kLine;
  const uint8_t* from = static_cast<const uint8_t*>(in);
  std::vector<uint8_t> held(in == out ? size_t(sum_before(recv_bytes, size)) : 0);
  uint8_t* const to = in == out ? held.data() : static_cast<uint8_t*>(out);
  int64_t longest = *std::max_element(send_bytes, send_bytes + size);
  for (int64_t done = 0; done == 0 || done < longest; done += cell) {
    const uint32_t now = meeting_.next();
    uint8_t* slot = meeting_.slot(index, now);
    const auto part = [&](int64_t bytes) { return std::clamp<int64_t>(bytes - done, 0, cell); };
    for (int r = 0; r < size; r++) copy(slot + r * cell, from + sum_before(send_bytes, r) + done, part(send_bytes[r]), false);
    // Behind the data: what this rank sends to whom, so that a rank expecting something else is an error; and how long it takes.
    if (done == 0) std::memcpy(slot + kSlot - table, send_bytes, size_t(table));
    meeting_.post({longest, -1, signature(Call::all_to_all, 0)});
    meeting_.await(now);
    for (int i = 0; i < size; i++) longest = std::max(longest, meeting_.record(i, now).in);
    for (int i = 0; i < size && done == 0; i++) {
      const int64_t sent = reinterpret_cast<const int64_t*>(meeting_.slot(i, now) + kSlot - table)[index];
      if (sent != recv_bytes[i])
        fail(Status::comm, "rank %d sent %lld bytes in all_to_all where rank %d expected %lld", meeting_.name(i), (long long)sent, meeting_.name(index), (long long)recv_bytes[i]);
    }
    for (int i = 0; i < size; i++) copy(to + sum_before(recv_bytes, i) + done, meeting_.slot(i, now) + index * cell, part(recv_bytes[i]), false);
  }
  if (!held.empty()) std::memcpy(out, held.data(), held.size());
}

void HostCollectives::broadcast(void* data, int64_t bytes, int root) {
  meeting_.begin("broadcast");
  const uint64_t call = signature(Call::broadcast, bytes, root);
  const bool source = meeting_.index == root;
  const int64_t place = source && bytes > kSlot ? memory_->offset(data, bytes) : -1;
  uint8_t* at = static_cast<uint8_t*>(data);
  bool placed = false;
  for (int64_t done = 0; done == 0 || (done < bytes && !placed); done += kSlot) {
    const uint32_t now = meeting_.next();
    const int64_t m = std::min(kSlot, bytes - done);
    if (source && place < 0) copy(meeting_.slot(root, now), at + done, m, false);
    meeting_.post({place, -1, call});
    meeting_.await(now);
    placed = meeting_.record(root, now).in >= 0;
    if (!source) copy(at + done, placed ? peer_in(root, now) : meeting_.slot(root, now), placed ? bytes : m, false);
  }
  if (placed) meeting_.meet();
}

void HostCollectives::barrier() {
  meeting_.begin("barrier");
  meeting_.await(meeting_.post({-1, -1, signature(Call::barrier, 0)}));
}

}  // namespace ckdist
