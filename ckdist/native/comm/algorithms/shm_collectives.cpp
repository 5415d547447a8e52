#include "comm/algorithms/shm_collectives.h"

#include <algorithm>
#include <cstring>

#include "comm/algorithms/signature.h"
#include "core/error.h"
#include "core/futex.h"
#include "kernels/kernels.h"

namespace ckdist {

namespace {

constexpr int64_t kSlot = ShmRendezvous::kSlotBytes;
constexpr int64_t kLine = 64;
// Chunk sizes for buffers that are reduced through slots. A buffer has several chunks. Chunks of large buffers are
// large enough to be evicted from L2 to L3 before the peer reads them. Measured from 4 MiB on: up to 1/8 faster for
// near ranks, 1/5 for distant ranks.
constexpr int64_t kLeastChunk = 128 << 10, kMostChunk = 512 << 10;
static_assert(kMostChunk + kLine <= kSlot, "a chunk begins wherever in a cache line its buffer does");
constexpr int64_t kPiece = 512 << 10;  // bytes of a piece of data that is only moved through slots
static_assert(kPiece + kLine <= kSlot);
// Bytes of buffers that are reduced in place between synchronizations. Ranks stay close together, so that shared
// data is still in caches.
constexpr int64_t kBlock = 1 << 20;

constexpr int64_t kAhead = 16 << 10;  // bytes prefetched to L2 at once; after that the hardware prefetcher has started
// From these sizes on, parts in arenas are written directly to the peers' buffers. This costs one more barrier, and the
// receiver reads from another core's cache (near) or from memory (distant). For distant ranks it still takes half the
// time of staging.
constexpr int64_t kDirectNear = 1 << 20, kDirectDistant = 8 << 10;
constexpr int64_t kStreamed =
    16 << 20;                       // bytes in and out that exceed the caches: streaming stores, for near peers too
constexpr int64_t kRead = 4 << 10;  // bytes that several copies read in turn

constexpr int64_t kTaken = 4 << 10;  // bytes that are copied from a peer at a time, to fold them from the L1 cache

// Rank i's slice of n elements. It begins at a cache line if possible.
struct Slice {
  int64_t begin, end;
  Slice(int64_t n, int i, int size, int64_t element) {
    const int64_t unit = kLine / element, units = n / unit;
    begin = i ? units * i / size * unit : 0;
    end = i + 1 < size ? units * (i + 1) / size * unit : n;
  }
};

// Staged data has the same offset in a cache line as its buffer, so that no vector crosses a line on one side only. The
// record of a buffer outside the arenas holds this offset. For small data that is only moved, alignment would cost more
// than it saves.
constexpr int64_t kAligned = 32 << 10;
int64_t shifted(const void* data) { return -1 - int64_t(reinterpret_cast<uintptr_t>(data) % kLine); }
int64_t moved(const void* data, int64_t bytes) { return bytes < kAligned ? -1 : shifted(data); }
int64_t shift(const ShmRendezvous::Record& record) { return -1 - record.in; }

// Prefetches lines that another core has written, to L2: it allows twice the outstanding misses of L1 (measured: 64
// distant lines in 350 ns instead of 540 ns).
void prefetch_lines(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < std::min(bytes, kAhead); i += kLine)
    __builtin_prefetch(static_cast<const uint8_t*>(data) + i, 0, 2);
}

int64_t chunk_bytes(int64_t bytes) { return std::clamp(bytes / 4 / kLine * kLine, kLeastChunk, kMostChunk); }

}  // namespace

ShmCollectives::ShmCollectives(ShmRendezvous& rendezvous, std::shared_ptr<HostMemory> memory, std::vector<int> arenas,
                               const Thresholds& thresholds)
    : rendezvous_(rendezvous),
      distance_(rendezvous),
      memory_(std::move(memory)),
      arenas_(std::move(arenas)),
      thresholds_(thresholds),
      order_(std::vector<int>(rendezvous.size, 0)),
      parts_(rendezvous.size),
      outs_(rendezvous.size),
      shifts_(rendezvous.size) {
  thresholds_.direct_bytes = std::min(thresholds_.direct_bytes, ShmRendezvous::kEagerBytes);
}

void ShmCollectives::copy(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, size_t(bytes));
}

void ShmCollectives::take(void* to, uint8_t* from, int64_t bytes) { kernels().reduce.take(to, from, bytes); }

void ShmCollectives::fetch(void* to, uint8_t* from, int64_t bytes) const {
  prefetch_lines(from, bytes);
  if (rendezvous_.size == 2) take(to, from, bytes);
  else copy(to, from, bytes);
}

bool ShmCollectives::all_placed(uint32_t epoch, bool outs) const {
  for (int i = 0; i < rendezvous_.size; i++)
    if (rendezvous_.record(i, epoch).in < 0 || (outs && rendezvous_.record(i, epoch).out < 0)) return false;
  return true;
}

int ShmCollectives::placed_outs(uint32_t epoch) const {
  int placed = 0;
  for (int i = 0; i < rendezvous_.size; i++) placed += rendezvous_.record(i, epoch).out >= 0;
  return placed;
}

void ShmCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  rendezvous_.begin("all_reduce", signature(Call::reduce, n, reduction(e, op)));
  const int size = rendezvous_.size;
  const int64_t bytes = n * element_bytes(e);
  if (bytes * (size - 1) <= thresholds_.direct_bytes) return reduce_eager(in, out, n, e, op);
  ShmRendezvous::Record own{memory_->offset(in, bytes), memory_->offset(out, bytes)};
  const bool placed = own.in >= 0 && own.out >= 0;
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const ShmRendezvous::Record elsewhere{shifted(in), -1};
  const auto stage_first = [&] {
    stage(rendezvous_.slot(rendezvous_.index, rendezvous_.next()) + shift(elsewhere), from,
          std::min(n, chunk_bytes(bytes) / element_bytes(e)), element_bytes(e));
  };
  // A rank with buffers outside the arenas fills its slot before it posts. If all ranks do so, the first chunk is
  // staged.
  if (!placed) own = elsewhere, stage_first();
  uint32_t first = rendezvous_.meet(own);
  if (all_placed(first, true)) return reduce_in_place(first, n, e, op);
  bool staged = true;
  for (int i = 0; i < size; i++) staged = staged && rendezvous_.record(i, first).in < 0;
  if (!staged) {  // some slots are empty: all ranks stage and post again
    stage_first();
    first = rendezvous_.meet(elsewhere);
  }
  reduce_staged(from, static_cast<uint8_t*>(out), n, e, op, first);
}

// Every rank receives all ranks' values and folds them itself. The received lines are also written, so that this core
// owns them.
void ShmCollectives::reduce_eager(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  const int size = rendezvous_.size, index = rendezvous_.index;
  rendezvous_.begin_eager();
  for (int k = 1; k < size; k++) rendezvous_.send_eager((index + k) % size, in, n * element_bytes(e));
  parts_[index] = in, outs_[index] = out;
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    parts_[i] = outs_[i] = rendezvous_.await_eager(i);
    prefetch_lines(parts_[i], n * element_bytes(e));
  }
  order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), n);
}

// Every rank folds its slice of each block from all ranks' buffers and writes the result to all of them. So a slice has
// one writer, and no other rank reads it at the same time.
void ShmCollectives::reduce_in_place(uint32_t epoch, int64_t n, Element e, ReduceOp op) {
  const int64_t element = element_bytes(e), block = kBlock / element;
  for (int64_t done = 0; done < n; done += block) {
    const Slice mine(std::min(block, n - done), rendezvous_.index, rendezvous_.size, element);
    for (int i = 0; i < rendezvous_.size; i++) {
      parts_[i] = peer_in(i, epoch) + (done + mine.begin) * element;
      outs_[i] = peer_out(i, epoch) + (done + mine.begin) * element;
      if (i != rendezvous_.index) prefetch_lines(parts_[i], (mine.end - mine.begin) * element);
    }
    order_.fold_ranks(e, op, outs_.data(), rendezvous_.size, parts_.data(), mine.end - mine.begin);
  }
  rendezvous_.meet();
  const Slice mine(std::min(block, n), rendezvous_.index, rendezvous_.size, element);
  const uint8_t* const result = peer_out(rendezvous_.index, epoch);
  prefetch_lines(result, mine.begin * element);
  prefetch_lines(result + mine.end * element, (std::min(block, n) - mine.end) * element);
}

// For each chunk, a rank stages the slices that its peers fold (all except its own), folds its slice of the chunk into
// all slots, and copies the rest of the result from its own slot. So every line of a slot goes to one peer and back.
// Between two barriers a rank works on three chunks: it stages the next, folds the present, and copies the last. The
// next chunk is staged in the slot of the last one. `first`: the epoch in which the first chunk was in every rank's
// slot.
void ShmCollectives::reduce_staged(const uint8_t* in, uint8_t* out, int64_t n, Element e, ReduceOp op, uint32_t first) {
  const int64_t element = element_bytes(e), chunk = chunk_bytes(n * element), per_chunk = chunk / element,
                chunks = (n + per_chunk - 1) / per_chunk;
  const int size = rendezvous_.size, index = rendezvous_.index;
  const ShmRendezvous::Record own = rendezvous_.record(index, first);
  for (int i = 0; i < size; i++) shifts_[i] = shift(rendezvous_.record(i, first));
  const auto elements = [&](int64_t c) { return std::clamp<int64_t>(n - c * per_chunk, 0, per_chunk); };
  const auto slot = [&](int i, int64_t c) { return rendezvous_.slot(i, first + uint32_t(c % 2)) + shifts_[i]; };
  for (int64_t c = 0; c <= chunks; c++) {
    const int64_t last = (c - 1) * chunk, next = (c + 1) * chunk;
    uint8_t* const staged = slot(index, c + 1);
    if (c && elements(c + 1) == per_chunk) {
      const Slice mine(per_chunk, index, size, element);
      const int64_t begin = mine.begin * element, end = mine.end * element;
      kernels().reduce.exchange(out + last, staged, in + next, begin);
      kernels().reduce.exchange(out + last + end, staged + end, in + next + end, chunk - end);
    } else {
      if (c) {
        const Slice mine(elements(c - 1), index, size, element);
        const int64_t begin = mine.begin * element, end = mine.end * element;
        take(out + last, staged, begin);
        take(out + last + end, staged + end, elements(c - 1) * element - end);
      }
      stage(staged, in + next, elements(c + 1), element);
    }
    if (c == chunks) return;
    const Slice mine(elements(c), index, size, element);
    for (int i = 0; i < size; i++) {
      parts_[i] = outs_[i] = slot(i, c) + mine.begin * element;
      if (i != index) prefetch_lines(parts_[i], (mine.end - mine.begin) * element);
    }
    parts_[index] = in + c * chunk + mine.begin * element;
    outs_[index] = out + c * chunk + mine.begin * element;
    order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), mine.end - mine.begin);
    rendezvous_.meet(own);
  }
}

// Copies n elements except this rank's own slice.
void ShmCollectives::stage(uint8_t* slot, const uint8_t* in, int64_t n, int64_t element) const {
  const Slice mine(n, rendezvous_.index, rendezvous_.size, element);
  copy(slot, in, mine.begin * element);
  copy(slot + mine.end * element, in + mine.end * element, (n - mine.end) * element);
}

void ShmCollectives::reduce_scatter(const void* in, void* out, const int64_t* counts, Element e, ReduceOp op) {
  const int size = rendezvous_.size, index = rendezvous_.index;
  const int64_t element = element_bytes(e), total = sum_before(counts, size), own_first = sum_before(counts, index);
  rendezvous_.begin("reduce_scatter", signature(Call::reduce_scatter, total, reduction(e, op)));
  const uint32_t epoch = rendezvous_.meet({memory_->offset(in, total * element), -1});
  // `out` may be `in`: a peer may still read the part that this rank would write. So the result is held in a buffer.
  held_.resize(in == out ? size_t(counts[index] * element) : 0);
  uint8_t* const result = in == out ? held_.data() : static_cast<uint8_t*>(out);
  if (all_placed(epoch, false)) {
    taken_.resize(size_t(size * kTaken));
    for (int64_t done = 0; done < counts[index]; done += kTaken / element) {
      const int64_t m = std::min(kTaken / element, counts[index] - done);
      for (int i = 0; i < size; i++) {
        uint8_t* const part = peer_in(i, epoch) + (own_first + done) * element;
        if (i != index) take(&taken_[i * kTaken], part, m * element);
        parts_[i] = i == index ? part : &taken_[i * kTaken];
      }
      void* at = result + done * element;
      order_.fold_ranks(e, op, &at, 1, parts_.data(), m);
    }
    rendezvous_.meet();
    if (!held_.empty()) std::memcpy(out, held_.data(), held_.size());
    return;
  }
  const int64_t cell = kSlot / size / kLine * kLine, per_cell = cell / element,
                longest = *std::max_element(counts, counts + size);
  for (int64_t done = 0; done < longest; done += per_cell) {
    const auto part = [&](int r) { return std::clamp<int64_t>(counts[r] - done, 0, per_cell); };
    for (int r = 0; r < size; r++)
      if (r != index)
        copy(rendezvous_.slot(index, rendezvous_.next()) + r * cell,
             static_cast<const uint8_t*>(in) + (sum_before(counts, r) + done) * element, part(r) * element);
    const uint32_t now = rendezvous_.meet({-1, -1});
    for (int i = 0; i < size; i++) parts_[i] = outs_[i] = rendezvous_.slot(i, now) + index * cell;
    parts_[index] = static_cast<const uint8_t*>(in) + (own_first + done) * element;
    outs_[index] = result + done * element;
    order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), part(index));
  }
  if (!held_.empty()) std::memcpy(out, held_.data(), held_.size());
}

uint32_t ShmCollectives::meet(const ShmRendezvous::Record& own, bool probe) {
  if (probe) distance_.write_probe();
  const uint32_t epoch = rendezvous_.meet(own);
  if (probe) distance_.measure();
  return epoch;
}

bool ShmCollectives::worth_direct_write(int64_t bytes) const {
  return bytes >= kDirectNear || (bytes >= kDirectDistant && distance_.any_distant());
}

// Writes a part to peer i. `total`: bytes that the call reads and writes on this rank.
void ShmCollectives::write_to_peer(int i, uint8_t* to, const uint8_t* from, int64_t bytes, int64_t total) const {
  if (distance_.distant(i) || total >= kStreamed) widest_stream_copy()(to, from, bytes);
  else copy(to, from, bytes);
}

// Moves parts of up to `longest` bytes in pieces of `piece` bytes. `stage(done)` fills this rank's slot; `read(i,
// done)` copies the data that rank i staged. `now`: the epoch of the slots that are read. `staged`: all ranks have
// already filled their slots.
template <class Stage, class Read>
void ShmCollectives::through_slots(const ShmRendezvous::Record& own, uint32_t& now, bool staged, int64_t longest,
                                   int64_t piece, const Stage& stage, const Read& read) {
  for (int64_t done = 0; done == 0 || done < longest; done += piece) {
    if (done || !staged) {
      stage(done);
      now = rendezvous_.meet(own);
    }
    for (int k = 1; k < rendezvous_.size; k++) read((rendezvous_.index + k) % rendezvous_.size, done);
  }
}

void ShmCollectives::all_gather(const void* in, void* out, const int64_t* bytes) {
  const int size = rendezvous_.size, index = rendezvous_.index;
  const int64_t total = sum_before(bytes, size), longest = *std::max_element(bytes, bytes + size),
                before = sum_before(bytes, index);
  rendezvous_.begin("all_gather", signature(Call::gather, total));
  uint8_t* const to = static_cast<uint8_t*>(out);
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const auto part = [&](int i, int64_t done) { return std::clamp<int64_t>(bytes[i] - done, 0, kPiece); };
  const ShmRendezvous::Record elsewhere{moved(in, longest), -1};
  const auto stage = [&](int64_t done) {
    uint8_t* const slot = rendezvous_.slot(index, rendezvous_.next()) + shift(elsewhere);
    const int64_t n = part(index, done);
    if (n >= kAligned) return kernels().reduce.copy_twice(to + before + done, slot, from + done, n);
    copy(slot, from + done, n);
    copy(to + before + done, from + done, n);
  };
  const bool large = longest >= kDirectDistant;
  ShmRendezvous::Record own = elsewhere;
  if (worth_direct_write(longest)) own.out = memory_->offset(out, total);
  if (own.out < 0) stage(0);
  uint32_t now = meet(own, large);
  const int placed = large ? placed_outs(now) : 0;
  if (placed == size) {
    for (int64_t done = 0; done < bytes[index]; done += kRead) {
      const int64_t n = std::min(kRead, bytes[index] - done);
      for (int k = 1; k < size; k++) {
        const int i = (index + k) % size;
        write_to_peer(i, peer_out(i, now) + before + done, from + done, n, bytes[index] + total);
      }
      copy(to + before + done, from + done, n);
    }
    stream_fence();
    rendezvous_.meet();
    return;
  }
  const auto read = [&](int i, int64_t done) {
    fetch(to + sum_before(bytes, i) + done, rendezvous_.slot(i, now) + shift(rendezvous_.record(i, now)),
          part(i, done));
  };
  through_slots(elsewhere, now, placed == 0, longest, kPiece, stage, read);
}

// In a slot, after the parts: bytes that its rank sends to each rank, then bytes that it expects from each rank.
int64_t* ShmCollectives::sizes(int i, uint32_t epoch) const {
  return reinterpret_cast<int64_t*>(rendezvous_.slot(i, epoch) + kPiece);
}

// Checks that every peer sends the bytes that this rank expects, and expects the bytes that it sends. Returns the
// longest part of any peer.
int64_t ShmCollectives::check_sizes(const int64_t* send_bytes, const int64_t* recv_bytes, uint32_t epoch) const {
  const int size = rendezvous_.size, index = rendezvous_.index;
  int64_t longest = 0;
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    const int64_t* const theirs = sizes(i, epoch);
    rendezvous_.check_sent(i, theirs[index], index, recv_bytes[i]);
    rendezvous_.check_sent(index, send_bytes[i], i, theirs[size + index]);
    longest = std::max(longest, *std::max_element(theirs, theirs + size));
  }
  return longest;
}

void ShmCollectives::all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) {
  rendezvous_.begin("all_to_all", signature(Call::all_to_all, 0));
  const int size = rendezvous_.size, index = rendezvous_.index;
  // Each slot has a part of this length for every rank.
  const int64_t pitch = kPiece / size / kLine * kLine, most = pitch - kLine;
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  held_.resize(in == out ? size_t(sum_before(recv_bytes, size)) : 0);
  uint8_t* const to = in == out ? held_.data() : static_cast<uint8_t*>(out);
  const auto larger = [&](const int64_t* some) { return *std::max_element(some, some + size); };
  const int64_t own_longest = std::max(larger(send_bytes), larger(recv_bytes));
  const ShmRendezvous::Record elsewhere{moved(in, own_longest), -1};
  const auto part = [&](int64_t bytes, int64_t done) { return std::clamp<int64_t>(bytes - done, 0, most); };
  const auto place = [&](const ShmRendezvous::Record& of, int i) { return i * pitch + shift(of); };
  const auto stage = [&](int64_t done) {
    uint8_t* const slot = rendezvous_.slot(index, rendezvous_.next());
    for (int r = 0; r < size; r++)
      copy(r == index ? to + sum_before(recv_bytes, r) + done : slot + place(elsewhere, r),
           from + sum_before(send_bytes, r) + done, part(send_bytes[r], done));
  };
  rendezvous_.check_sent(index, send_bytes[index], index, recv_bytes[index]);
  ShmRendezvous::Record own = elsewhere;
  if (in != out && worth_direct_write(own_longest)) own.out = memory_->offset(out, sum_before(recv_bytes, size));
  if (own.out < 0) stage(0);
  int64_t* const told = sizes(index, rendezvous_.next());
  std::copy(recv_bytes, recv_bytes + size, std::copy(send_bytes, send_bytes + size, told));
  const bool probed = own_longest >= kDirectDistant;
  uint32_t now = meet(own, probed);
  const int64_t longest = std::max(own_longest, check_sizes(send_bytes, recv_bytes, now));
  const int placed = placed_outs(now);
  if (placed == size) {
    for (int k = 1; k < size; k++) {
      const int i = (index + k) % size;
      write_to_peer(i, peer_out(i, now) + sum_before(sizes(i, now) + size, index), from + sum_before(send_bytes, i),
                    send_bytes[i], sum_before(send_bytes, size) + sum_before(recv_bytes, size));
    }
    copy(to + sum_before(recv_bytes, index), from + sum_before(send_bytes, index), send_bytes[index]);
    stream_fence();
    rendezvous_.meet();
    return;
  }
  const auto read = [&](int i, int64_t done) {
    take(to + sum_before(recv_bytes, i) + done, rendezvous_.slot(i, now) + place(rendezvous_.record(i, now), index),
         part(recv_bytes[i], done));
  };
  through_slots(elsewhere, now, placed == 0, longest, most, stage, read);
  if (!held_.empty()) std::memcpy(out, held_.data(), held_.size());
}

void ShmCollectives::broadcast(void* data, int64_t bytes, int root) {
  rendezvous_.begin("broadcast", signature(Call::broadcast, bytes, root));
  const bool source = rendezvous_.index == root, probed = bytes >= kDirectDistant;
  uint8_t* const at = static_cast<uint8_t*>(data);
  ShmRendezvous::Record own{moved(data, bytes), -1};
  // The owner may have read these lines since it wrote them. Then fetching them from a distant rank is slow.
  if (const int64_t place = memory_->offset(data, bytes);
      source && place >= 0 && bytes > kPiece && !distance_.any_distant())
    own.in = place;
  for (int64_t done = 0;;) {
    uint8_t* const slot = rendezvous_.slot(root, rendezvous_.next());
    const int64_t n = std::min(kPiece, bytes - done);
    if (source && own.in < 0) copy(slot + shift(own), at + done, n);
    const uint32_t now = meet(own, probed);
    const ShmRendezvous::Record from = rendezvous_.record(root, now);
    if (from.in >= 0) {
      if (!source) fetch(at, peer_in(root, now), bytes);
      return rendezvous_.meet();
    }
    if (!source) fetch(at + done, slot + shift(from), n);
    if ((done += kPiece) >= bytes) return;
  }
}

void ShmCollectives::barrier() {
  rendezvous_.begin("barrier", signature(Call::barrier, 0));
  rendezvous_.meet();
}

}  // namespace ckdist
