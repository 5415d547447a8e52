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
// Of buffers reduced through slots: several chunks of each buffer, and of large ones so much that what was staged has
// gone from its core's second-level cache to the third when the peer comes for it (measured from 4 MiB on: up to an
// eighth faster near, a fifth far).
constexpr int64_t kLeastChunk = 128 << 10, kMostChunk = 512 << 10;
static_assert(kMostChunk + kLine <= kSlot, "a chunk begins wherever in a cache line its buffer does");
constexpr int64_t kPiece = 512 << 10;  // of what is only moved through slots
static_assert(kPiece + kLine <= kSlot);
constexpr int64_t kBlock =
    1 << 20;  // of buffers reduced in place: the ranks keep together, so that what they share is still in caches

constexpr int64_t kAhead =
    16 << 10;  // bytes called to the second-level cache at once: beyond, the core has noticed by itself what is read
// Parts from which on they are written straight to where peers want them, if that lies in arenas: beyond a meeting
// more, it costs that the receiver finds them in another core's cache (near), or in memory (afar, where both together
// still take half of the time of staging).
constexpr int64_t kGivenNear = 1 << 20, kGivenFar = 8 << 10;
constexpr int64_t kStreamed =
    16 << 20;  // bytes in and out that caches do not hold: they are written past them, near as well
constexpr int64_t kRead = 4 << 10;  // bytes that several copies read one after the other

constexpr int64_t kTaken =
    4 << 10;  // bytes brought from a peer's buffer at a time, to be folded from the first-level cache

// Rank i's slice of n elements, cut at cache lines where it can be.
struct Slice {
  int64_t begin, end;
  Slice(int64_t n, int i, int size, int64_t element) {
    const int64_t unit = kLine / element, units = n / unit;
    begin = i ? units * i / size * unit : 0;
    end = i + 1 < size ? units * (i + 1) / size * unit : n;
  }
};

// What is staged lies in its slot as its buffer lies in cache lines: then no vector crosses them on one side alone. A
// record of buffers outside the arenas says how far into a line they begin; of few bytes that are only moved, a
// beginning by itself would cost more than it saves.
constexpr int64_t kAligned = 32 << 10;
int64_t shifted(const void* data) { return -1 - int64_t(reinterpret_cast<uintptr_t>(data) % kLine); }
int64_t moved(const void* data, int64_t bytes) { return bytes < kAligned ? -1 : shifted(data); }
int64_t shift(const Meeting::Record& record) { return -1 - record.in; }

// Calls lines that another core has written. The second-level cache awaits twice as many at a time as the first
// (measured: 64 lines from afar in 350 ns instead of 540).
void call_lines(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < std::min(bytes, kAhead); i += kLine)
    __builtin_prefetch(static_cast<const uint8_t*>(data) + i, 0, 2);
}

int64_t chunk_bytes(int64_t bytes) { return std::clamp(bytes / 4 / kLine * kLine, kLeastChunk, kMostChunk); }

int64_t sum_before(const int64_t* counts, int i) { return std::accumulate(counts, counts + i, int64_t(0)); }

}  // namespace

HostCollectives::HostCollectives(Meeting& meeting, std::shared_ptr<HostMemory> memory, std::vector<int> arenas,
                                 const Thresholds& thresholds)
    : meeting_(meeting),
      reach_(meeting),
      memory_(std::move(memory)),
      arenas_(std::move(arenas)),
      thresholds_(thresholds),
      order_(std::vector<int>(meeting.size, 0)),
      parts_(meeting.size),
      outs_(meeting.size),
      shifts_(meeting.size) {
  thresholds_.direct_bytes = std::min(thresholds_.direct_bytes, Meeting::kParcelBytes);
}

void HostCollectives::copy(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, size_t(bytes));
}

void HostCollectives::take(void* to, uint8_t* from, int64_t bytes) { kernels().reduce.take(to, from, bytes); }

void HostCollectives::fetch(void* to, uint8_t* from, int64_t bytes) const {
  call_lines(from, bytes);
  if (meeting_.size == 2) take(to, from, bytes);
  else copy(to, from, bytes);
}

bool HostCollectives::all_placed(uint32_t epoch, bool outs) const {
  for (int i = 0; i < meeting_.size; i++)
    if (meeting_.record(i, epoch).in < 0 || (outs && meeting_.record(i, epoch).out < 0)) return false;
  return true;
}

int HostCollectives::placed_outs(uint32_t epoch) const {
  int placed = 0;
  for (int i = 0; i < meeting_.size; i++) placed += meeting_.record(i, epoch).out >= 0;
  return placed;
}

void HostCollectives::all_reduce(const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  meeting_.begin("all_reduce");
  const int size = meeting_.size;
  const int64_t bytes = n * element_bytes(e);
  const uint64_t call = signature(Call::reduce, n, reduction(e, op));
  if (bytes * (size - 1) <= thresholds_.direct_bytes) return reduce_parcels(call, in, out, n, e, op);
  Meeting::Record own{memory_->offset(in, bytes), memory_->offset(out, bytes), call};
  const bool placed = own.in >= 0 && own.out >= 0;
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const Meeting::Record elsewhere{shifted(in), -1, call};
  const auto stage_first = [&] {
    stage(meeting_.slot(meeting_.index, meeting_.next()) + shift(elsewhere), from,
          std::min(n, chunk_bytes(bytes) / element_bytes(e)), element_bytes(e));
  };
  // A rank whose buffers lie elsewhere fills its slot before it says so: where no rank's are placed, that was the first
  // chunk.
  if (!placed) own = elsewhere, stage_first();
  uint32_t first = meeting_.post(own);
  meeting_.await(first);
  if (all_placed(first, true)) return reduce_in_place(first, n, e, op);
  bool staged = true;
  for (int i = 0; i < size; i++) staged = staged && meeting_.record(i, first).in < 0;
  if (!staged) {  // some slots are not filled: once more, with everyone's
    stage_first();
    meeting_.await(first = meeting_.post(elsewhere));
  }
  reduce_staged(from, static_cast<uint8_t*>(out), n, e, op, first);
}

// Everyone gets all of everyone's, and folds it for itself; what came is written as well, so that its lines are this
// core's own.
void HostCollectives::reduce_parcels(uint64_t call, const void* in, void* out, int64_t n, Element e, ReduceOp op) {
  const int size = meeting_.size, index = meeting_.index;
  meeting_.begin_parcels(call);
  for (int k = 1; k < size; k++) meeting_.give((index + k) % size, in, n * element_bytes(e));
  parts_[index] = in, outs_[index] = out;
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    parts_[i] = outs_[i] = meeting_.await_parcel(i);
    call_lines(parts_[i], n * element_bytes(e));
  }
  order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), n);
}

// Every rank folds its slice of each block from all ranks' buffers and writes it to all of them: no slice has two
// writers, nor a reader beside its writer.
void HostCollectives::reduce_in_place(uint32_t epoch, int64_t n, Element e, ReduceOp op) {
  const int64_t element = element_bytes(e), block = kBlock / element;
  for (int64_t done = 0; done < n; done += block) {
    const Slice mine(std::min(block, n - done), meeting_.index, meeting_.size, element);
    for (int i = 0; i < meeting_.size; i++) {
      parts_[i] = peer_in(i, epoch) + (done + mine.begin) * element;
      outs_[i] = peer_out(i, epoch) + (done + mine.begin) * element;
      if (i != meeting_.index) call_lines(parts_[i], (mine.end - mine.begin) * element);
    }
    order_.fold_ranks(e, op, outs_.data(), meeting_.size, parts_.data(), mine.end - mine.begin);
  }
  meeting_.meet();
  const Slice mine(std::min(block, n), meeting_.index, meeting_.size, element);
  const uint8_t* const result = peer_out(meeting_.index, epoch);
  call_lines(result, mine.begin * element);
  call_lines(result + mine.end * element, (std::min(block, n) - mine.end) * element);
}

// Chunk after chunk, each rank stages what its peers fold (all but its own slice), folds its slice of the chunk into
// all slots, and takes the rest of the result from its own: so every line of a slot goes to one peer and back. Between
// two meetings it does this for three chunks, the next, the present and the last; the last one's slot is what the next
// is staged in. `first`: the meeting at which the first chunk lay in every rank's slot.
void HostCollectives::reduce_staged(const uint8_t* in, uint8_t* out, int64_t n, Element e, ReduceOp op,
                                    uint32_t first) {
  const int64_t element = element_bytes(e), chunk = chunk_bytes(n * element), per_chunk = chunk / element,
                chunks = (n + per_chunk - 1) / per_chunk;
  const int size = meeting_.size, index = meeting_.index;
  const Meeting::Record own = meeting_.record(index, first);
  for (int i = 0; i < size; i++) shifts_[i] = shift(meeting_.record(i, first));
  const auto elements = [&](int64_t c) { return std::clamp<int64_t>(n - c * per_chunk, 0, per_chunk); };
  const auto slot = [&](int i, int64_t c) { return meeting_.slot(i, first + uint32_t(c % 2)) + shifts_[i]; };
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
      if (i != index) call_lines(parts_[i], (mine.end - mine.begin) * element);
    }
    parts_[index] = in + c * chunk + mine.begin * element;
    outs_[index] = out + c * chunk + mine.begin * element;
    order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), mine.end - mine.begin);
    meeting_.await(meeting_.post(own));
  }
}

// Copies all but this rank's own slice of n elements.
void HostCollectives::stage(uint8_t* slot, const uint8_t* in, int64_t n, int64_t element) const {
  const Slice mine(n, meeting_.index, meeting_.size, element);
  copy(slot, in, mine.begin * element);
  copy(slot + mine.end * element, in + mine.end * element, (n - mine.end) * element);
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
    held_.resize(in == out ? size_t(counts[index] * element) : 0);
    void* to = in == out ? held_.data() : out;
    taken_.resize(size_t(size * kTaken));
    for (int64_t done = 0; done < counts[index]; done += kTaken / element) {
      const int64_t m = std::min(kTaken / element, counts[index] - done);
      for (int i = 0; i < size; i++) {
        uint8_t* const part = peer_in(i, epoch) + (own_first + done) * element;
        if (i != index) take(&taken_[i * kTaken], part, m * element);
        parts_[i] = i == index ? part : &taken_[i * kTaken];
      }
      void* at = static_cast<uint8_t*>(to) + done * element;
      order_.fold_ranks(e, op, &at, 1, parts_.data(), m);
    }
    meeting_.meet();
    if (to != out) std::memcpy(out, to, held_.size());
    return;
  }
  held_.resize(in == out ? size_t(counts[index] * element) : 0);
  uint8_t* result = in == out ? held_.data() : static_cast<uint8_t*>(out);
  const int64_t cell = kSlot / size / kLine * kLine, per_cell = cell / element,
                longest = *std::max_element(counts, counts + size);
  for (int64_t done = 0; done < longest; done += per_cell) {
    const auto part = [&](int r) { return std::clamp<int64_t>(counts[r] - done, 0, per_cell); };
    const uint32_t now = meeting_.next();
    for (int r = 0; r < size; r++)
      if (r != index)
        copy(meeting_.slot(index, now) + r * cell,
             static_cast<const uint8_t*>(in) + (sum_before(counts, r) + done) * element, part(r) * element);
    meeting_.post({-1, -1, call});
    meeting_.await(now);
    for (int i = 0; i < size; i++) parts_[i] = outs_[i] = meeting_.slot(i, now) + index * cell;
    parts_[index] = static_cast<const uint8_t*>(in) + (own_first + done) * element;
    outs_[index] = result + done * element;
    order_.fold_ranks(e, op, outs_.data(), size, parts_.data(), part(index));
  }
  if (in == out && !held_.empty()) std::memcpy(out, held_.data(), held_.size());
}

uint32_t HostCollectives::meet(const Meeting::Record& own, bool feel) {
  if (feel) reach_.mark();
  const uint32_t epoch = meeting_.post(own);
  meeting_.await(epoch);
  if (feel) reach_.look();
  return epoch;
}

bool HostCollectives::worth_giving(int64_t bytes) const {
  return bytes >= kGivenNear || (bytes >= kGivenFar && reach_.any_far());
}

// `whole`: the bytes that the call reads and writes here.
void HostCollectives::give(int i, uint8_t* to, const uint8_t* from, int64_t bytes, int64_t whole) const {
  if (reach_.far(i) || whole >= kStreamed) widest_stream().copy(to, from, bytes);
  else copy(to, from, bytes);
}

void HostCollectives::all_gather(const void* in, void* out, const int64_t* bytes) {
  meeting_.begin("all_gather");
  const int size = meeting_.size, index = meeting_.index;
  const int64_t total = sum_before(bytes, size), longest = *std::max_element(bytes, bytes + size),
                before = sum_before(bytes, index);
  uint8_t* const to = static_cast<uint8_t*>(out);
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const auto part = [&](int i, int64_t done) { return std::clamp<int64_t>(bytes[i] - done, 0, kPiece); };
  const Meeting::Record elsewhere{moved(in, longest), -1, signature(Call::gather, total)};
  const auto stage = [&](int64_t done) {
    uint8_t* const slot = meeting_.slot(index, meeting_.next()) + shift(elsewhere);
    const int64_t n = part(index, done);
    if (n >= kAligned) return kernels().reduce.copy_twice(to + before + done, slot, from + done, n);
    copy(slot, from + done, n);
    copy(to + before + done, from + done, n);
  };
  const bool large = longest >= kGivenFar;
  Meeting::Record own = elsewhere;
  if (worth_giving(longest)) own.out = memory_->offset(out, total);
  if (own.out < 0) stage(0);
  uint32_t now = meet(own, large);
  const int placed = large ? placed_outs(now) : 0;
  if (placed == size) {
    for (int64_t done = 0; done < bytes[index]; done += kRead) {
      const int64_t n = std::min(kRead, bytes[index] - done);
      for (int k = 1; k < size; k++) {
        const int i = (index + k) % size;
        give(i, peer_out(i, now) + before + done, from + done, n, bytes[index] + total);
      }
      copy(to + before + done, from + done, n);
    }
    stream_fence();
    meeting_.meet();
    return;
  }
  if (placed) {  // some slots are not filled: once more, with everyone's
    stage(0);
    meeting_.await(now = meeting_.post(elsewhere));
  }
  for (int64_t done = 0;;) {
    for (int k = 1; k < size; k++) {
      const int i = (index + k) % size;
      fetch(to + sum_before(bytes, i) + done, meeting_.slot(i, now) + shift(meeting_.record(i, now)), part(i, done));
    }
    if ((done += kPiece) >= longest) return;
    stage(done);
    meeting_.await(now = meeting_.post(elsewhere));
  }
}

void HostCollectives::all_to_all(const void* in, const int64_t* send_bytes, void* out, const int64_t* recv_bytes) {
  meeting_.begin("all_to_all");
  const int size = meeting_.size, index = meeting_.index;
  // Of every slot, a part for each rank, so long:
  const int64_t pitch = kPiece / size / kLine * kLine, most = pitch - kLine;
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  held_.resize(in == out ? size_t(sum_before(recv_bytes, size)) : 0);
  uint8_t* const to = in == out ? held_.data() : static_cast<uint8_t*>(out);
  const auto larger = [&](const int64_t* some) { return *std::max_element(some, some + size); };
  const int64_t own_longest = std::max(larger(send_bytes), larger(recv_bytes));
  const Meeting::Record elsewhere{moved(in, own_longest), -1, signature(Call::all_to_all, 0)};
  const auto part = [&](int64_t bytes, int64_t done) { return std::clamp<int64_t>(bytes - done, 0, most); };
  const auto place = [&](const Meeting::Record& of, int i) { return i * pitch + shift(of); };
  // Behind the parts: what this rank sends to whom and gets from whom, so that a rank expecting something else is an
  // error.
  const auto sends = [&](int i, uint32_t epoch) {
    return reinterpret_cast<int64_t*>(meeting_.slot(i, epoch) + kPiece);
  };
  const auto receives = [&](int i, uint32_t epoch) { return sends(i, epoch) + size; };
  const auto stage = [&](int64_t done) {
    uint8_t* const slot = meeting_.slot(index, meeting_.next());
    for (int r = 0; r < size; r++)
      copy(r == index ? to + sum_before(recv_bytes, r) + done : slot + place(elsewhere, r),
           from + sum_before(send_bytes, r) + done, part(send_bytes[r], done));
  };
  const auto check = [&](int i, int64_t sent, int j, int64_t expected) {
    if (sent == expected) return;
    meeting_.check_given_up();
    fail(Status::comm, "rank %d sent %lld bytes in all_to_all where rank %d expected %lld", meeting_.name(i),
         (long long)sent, meeting_.name(j), (long long)expected);
  };
  check(index, send_bytes[index], index, recv_bytes[index]);
  Meeting::Record own = elsewhere;
  if (in != out && worth_giving(own_longest)) own.out = memory_->offset(out, sum_before(recv_bytes, size));
  if (own.out < 0) stage(0);
  std::copy(send_bytes, send_bytes + size, sends(index, meeting_.next()));
  std::copy(recv_bytes, recv_bytes + size, receives(index, meeting_.next()));
  const bool felt = own_longest >= kGivenFar;
  uint32_t now = meet(own, felt);
  int64_t longest = own_longest;
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    const int64_t* const theirs = sends(i, now);
    check(i, theirs[index], index, recv_bytes[i]);
    check(index, send_bytes[i], i, theirs[size + index]);
    longest = std::max(longest, larger(theirs));
  }
  const int placed = placed_outs(now);
  if (placed == size) {
    for (int k = 1; k < size; k++) {
      const int i = (index + k) % size;
      give(i, peer_out(i, now) + sum_before(receives(i, now), index), from + sum_before(send_bytes, i), send_bytes[i],
           sum_before(send_bytes, size) + sum_before(recv_bytes, size));
    }
    copy(to + sum_before(recv_bytes, index), from + sum_before(send_bytes, index), send_bytes[index]);
    stream_fence();
    meeting_.meet();
    return;
  }
  if (placed) {  // some slots are not filled: once more, with everyone's
    stage(0);
    meeting_.await(now = meeting_.post(elsewhere));
  }
  for (int64_t done = 0;;) {
    for (int k = 1; k < size; k++) {
      const int i = (index + k) % size;
      take(to + sum_before(recv_bytes, i) + done, meeting_.slot(i, now) + place(meeting_.record(i, now), index),
           part(recv_bytes[i], done));
    }
    if ((done += most) >= longest) break;
    stage(done);
    meeting_.await(now = meeting_.post(elsewhere));
  }
  if (!held_.empty()) std::memcpy(out, held_.data(), held_.size());
}

void HostCollectives::broadcast(void* data, int64_t bytes, int root) {
  meeting_.begin("broadcast");
  const bool source = meeting_.index == root, felt = bytes >= kGivenFar;
  uint8_t* const at = static_cast<uint8_t*>(data);
  Meeting::Record own{moved(data, bytes), -1, signature(Call::broadcast, bytes, root)};
  // Afar, lines that their owner has read since it wrote them would be slow to take.
  if (const int64_t place = memory_->offset(data, bytes); source && place >= 0 && bytes > kPiece && !reach_.any_far())
    own.in = place;
  for (int64_t done = 0;;) {
    uint8_t* const slot = meeting_.slot(root, meeting_.next());
    const int64_t n = std::min(kPiece, bytes - done);
    if (source && own.in < 0) copy(slot + shift(own), at + done, n);
    const uint32_t now = meet(own, felt);
    const Meeting::Record from = meeting_.record(root, now);
    if (from.in >= 0) {
      if (!source) fetch(at, peer_in(root, now), bytes);
      return meeting_.meet();
    }
    if (!source) fetch(at + done, slot + shift(from), n);
    if ((done += kPiece) >= bytes) return;
  }
}

void HostCollectives::barrier() {
  meeting_.begin("barrier");
  meeting_.await(meeting_.post({-1, -1, signature(Call::barrier, 0)}));
}

}  // namespace ckdist
