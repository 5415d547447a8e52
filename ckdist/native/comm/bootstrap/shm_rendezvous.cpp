#include "comm/bootstrap/shm_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/failure/failure_detector.h"
#include "comm/failure/process.h"
#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

namespace {
constexpr int64_t kTickNs = 100'000'000;
constexpr int64_t kServeNs = 1'000'000;    // between two checks for one-sided messages, while waiting
constexpr int64_t kPieceBytes = 16 << 10;  // copied at a time, so that writer and reader of a pipe overlap
constexpr int kBellPolls = 2000;
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
}  // namespace

struct ShmRendezvous::Line {
  struct alignas(64) Arrival : ShmFlag {
    Record records[2];
  } arrival;
  Signal bell;  // signalled when one of the rank's pipes has changed
  alignas(64) std::atomic<uint32_t> probe;
  alignas(64) std::atomic<uint64_t> start, heartbeats, moved;
  std::atomic<int32_t> pid, abandoned, left, waits_for;
  char reason[420];  // why the rank failed; written before `abandoned`
};

struct ShmRendezvous::Pipe {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) uint8_t data[kPipeBytes];
};

struct ShmRendezvous::EagerBox {
  // Aligned like buffers in arenas: a load waits for an earlier store if the lower twelve bits of their addresses are
  // equal.
  alignas(4096) uint8_t data[kEagerBytes];
  struct alignas(64) Label : ShmFlag {
    uint64_t signature;
  } label;
};

int64_t ShmRendezvous::bytes_for(int size) {
  const int64_t pairs = int64_t(size) * size;
  return round_up(size * int64_t(sizeof(Line)), Segment::kHugePage) + size * Segment::kHugePage +
         round_up(pairs * int64_t(sizeof(Pipe)), 4096) + pairs * int64_t(sizeof(EagerBox));
}

ShmRendezvous::ShmRendezvous(const std::string& path, int index, const std::vector<int>& ranks, int spins,
                             double timeout_s)
    : index(index),
      size(int(ranks.size())),
      ranks_(ranks),
      spins_(spins),
      timeout_ns_(int64_t(timeout_s * 1e9)),
      segment_(index ? Segment(path, bytes_for(size)) : Segment(bytes_for(size))) {
  slots_ = segment_.data() + round_up(size * int64_t(sizeof(Line)), Segment::kHugePage);
  pipes_ = slots_ + size * Segment::kHugePage;
  boxes_ = pipes_ + round_up(int64_t(size) * size * int64_t(sizeof(Pipe)), 4096);
  Line& own = line(index);
  own.waits_for = -1;
  own.start = process_start(getpid());
  own.pid = getpid();
  Segment::place_huge(slot(index, 0), Segment::kHugePage);  // the owner writes its slots before peers do
}

ShmRendezvous::Line& ShmRendezvous::line(int i) const { return reinterpret_cast<Line*>(segment_.data())[i]; }
ShmRendezvous::Pipe& ShmRendezvous::pipe(int from, int to) const {
  return reinterpret_cast<Pipe*>(pipes_)[from * size + to];
}
// Ranks i and j have two boxes, one from i to j and one from j to i, which swap direction with each message.
ShmRendezvous::EagerBox& ShmRendezvous::eager_box(int from, int to, uint32_t count) const {
  return reinterpret_cast<EagerBox*>(boxes_)[count % 2 ? from * size + to : to * size + from];
}
const ShmRendezvous::Record& ShmRendezvous::record(int i, uint32_t epoch) const {
  return line(i).arrival.records[epoch % 2];
}

void ShmRendezvous::check_alive(int i) const {
  const Line& peer = line(i);
  const int pid = peer.pid;
  if (peer.abandoned)
    fail(Status::comm, "rank %d (pid %d) gave up: %s%s", ranks_[i], pid, reason(i).c_str(), call_.context().c_str());
  if (pid && process_start(pid) != peer.start)
    fail(Status::comm, "rank %d (pid %d) died%s", ranks_[i], pid, call_.context().c_str());
}

void ShmRendezvous::check_given_up() const {
  for (int i = 0; i < size; i++)
    if (i != index && line(i).abandoned) check_alive(i);
}

void ShmRendezvous::check_sent(int i, int64_t sent, int j, int64_t expected) const {
  if (sent == expected) return;
  check_given_up();
  fail(Status::comm, "rank %d sent %lld bytes in all_to_all where rank %d expected %lld", ranks_[i], (long long)sent,
       ranks_[j], (long long)expected);
}

template <class Idle>
void ShmRendezvous::wait_for(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns, Idle&& idle) {
  for (int polls = 0; !flag.reached(count) && polls < spins_; polls++)
    idle();  // before the first poll too: otherwise a barrier takes a fifth longer
  if (!flag.reached(count)) sleep_until(flag, count, i, grace_ns);
}

void ShmRendezvous::barrier(int64_t grace_ns, Idle idle) {
  line(index).arrival.set(++epoch_);
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    wait_for(line(i).arrival, epoch_, i, grace_ns, idle);
  }
}

uint32_t ShmRendezvous::meet(const Record& record) {
  own_.in = record.in, own_.out = record.out;
  Line::Arrival& own = line(index).arrival;
  own.records[++epoch_ % 2] = own_;
  own.set(epoch_);
  for (int k = 1; k < size; k++) {
    const int i = (index + k) % size;
    wait_for(line(i).arrival, epoch_, i, 0, cpu_pause);
    if (this->record(i, epoch_).signature != own_.signature) fail_other_call(i);
  }
  return epoch_;
}

void ShmRendezvous::send_eager(int i, const void* data, int64_t bytes) {
  EagerBox& to = eager_box(index, i, eager_sent_);
  if (bytes) std::memcpy(to.data, data, size_t(bytes));
  to.label.signature = own_.signature;
  to.label.set(eager_sent_);
}

uint8_t* ShmRendezvous::await_eager(int i) {
  EagerBox& from = eager_box(i, index, eager_sent_);
  wait_for(from.label, eager_sent_, i, 0, cpu_pause);
  if (from.label.signature != own_.signature) fail_other_call(i);
  return from.data;
}

void ShmRendezvous::await(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns) {
  wait_for(flag, count, i, grace_ns, cpu_pause);
}

void ShmRendezvous::sleep_until(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns) {
  const auto there = [&] { return flag.reached(count); };
  const auto peer_moved = [&] { return detector_ ? detector_->moved(ranks_[i]) : 0; };
  Waited quiet;
  int64_t looked = 0;
  uint64_t moved = peer_moved();
  bool told = false;
  while (!there()) {
    const uint32_t seen = flag.value.load(std::memory_order_acquire);
    if (there()) break;
    flag.sleep_while(seen, serve_ ? kServeNs : kTickNs);
    if (there()) break;
    if (serve_) serve_();
    if (detector_ && detector_->lost()) detector_->check(call_);
    if (const uint64_t got = peer_moved(); got != moved) moved = got, quiet = {};  // its bytes arrive: it is alive
    const int64_t ns = quiet.ns(), now = now_ns();
    if (now - looked < kTickNs) continue;
    looked = now;
    check_alive(i);
    // True if it waits for this rank in another call. This is read before the flag is read again, or the peer could
    // have passed in between.
    const bool elsewhere =
        int32_t(line(i).arrival.value.load(std::memory_order_acquire) - epoch_) > 0 ||
        int32_t(eager_box(i, index, eager_sent_ + 1).label.value.load(std::memory_order_acquire) - eager_sent_) > 0;
    if (elsewhere && !there()) fail_other_call(i);
    if (grace_ns == kForever || ns < timeout_ns_ / 2) continue;
    if (detector_ && !told) detector_->wait_for(ranks_[i]), told = true;
    if (ns > timeout_ns_ + grace_ns) fail_late(i);
  }
  if (told) detector_->wait_for(-1);
}

void ShmRendezvous::fail_late(int i) const {
  if (const int lost = detector_ ? detector_->blame(ranks_[i]) : ranks_[i]; lost != ranks_[i])
    fail(Status::comm, "rank %d did not answer within %.0f s%s", lost, double(timeout_ns_) / 1e9,
         call_.context().c_str());
  fail(Status::comm, "rank %d (pid %d) did not answer within %.0f s%s", ranks_[i], line(i).pid.load(),
       double(timeout_ns_) / 1e9, call_.context().c_str());
}

void ShmRendezvous::fail_other_call(int i) const {
  fail(Status::comm,
       "rank %d called another collective, or another size, where this rank called %s: all ranks must make the same "
       "calls in the same order",
       ranks_[i], call_.text().c_str());
}

double ShmRendezvous::round_trip(int calls) {
  begin("round_trip", 0);
  for (int i = 0; i < kSlots; i++) meet();  // no rank uses a slot any more
  const auto word = [&](int i) { return reinterpret_cast<std::atomic<uint32_t>*>(slot(i, 0)); };
  if (index < 2) word(index)->store(0);
  meet();
  const int64_t start = now_ns(), end = start + timeout_ns_;
  for (uint32_t i = 1; i <= uint32_t(calls) && index < 2 && size > 1; i++) {
    if (index == 0) word(0)->store(i, std::memory_order_release);
    for (int polls = 0; word(1 - index)->load(std::memory_order_acquire) != i; polls++)
      if (polls > 10000 && now_ns() > end)
        fail(Status::comm, "rank %d does not pass the cache line back", ranks_[1 - index]);
    if (index == 1) word(1)->store(i, std::memory_order_release);
  }
  const double seconds = double(now_ns() - start) * 1e-9 / calls;
  meet();
  return seconds;
}

void ShmRendezvous::write_probe() { line(index).probe.store(next(), std::memory_order_relaxed); }

int64_t ShmRendezvous::read_probe(int i) const {
  const int64_t start = now_ns();
  const bool written = line(i).probe.load(std::memory_order_acquire) == epoch_;
  const int64_t ns = now_ns() - start;
  return written ? ns : -1;
}

void ShmRendezvous::heartbeat(uint64_t moved, int waits_for) {
  Line& own = line(index);
  own.waits_for.store(waits_for, std::memory_order_relaxed);
  own.moved.store(moved, std::memory_order_relaxed);
  own.heartbeats.fetch_add(1, std::memory_order_relaxed);
}

void ShmRendezvous::leave() { line(index).left = 1; }

ShmRendezvous::Life ShmRendezvous::life(int i) const {
  const Line& l = line(i);
  const bool left = l.left;  // read first: a rank that leaves sends no more heartbeats
  return {l.pid, l.start, l.heartbeats, l.moved, l.waits_for, l.abandoned != 0, left};
}

std::string ShmRendezvous::reason(int i) const {
  const Line& l = line(i);
  return l.abandoned ? std::string(l.reason, strnlen(l.reason, sizeof l.reason)) : "";
}

void ShmRendezvous::abandon(const char* reason) {
  Line& own = line(index);
  std::call_once(abandoned_, [&] { std::strncpy(own.reason, reason, sizeof own.reason - 1); });
  own.abandoned = 1;
  own.arrival.wake();
  for (int i = 0; i < size; i++) ring(i);
}

void ShmRendezvous::ring(int i) const { line(i).bell.add(1); }

// Moves n bytes, piece by piece, and counts them in `moved`. copy(at, done, some): `some` bytes at `at` of the pipe.
template <class Copy>
int64_t ShmRendezvous::pass(int i, std::atomic<uint64_t>& moved, int64_t n, const Copy& copy) {
  const uint64_t begin = moved.load(std::memory_order_relaxed);
  for (int64_t done = 0; done < n;) {
    const int64_t at = int64_t((begin + uint64_t(done)) % kPipeBytes),
                  some = std::min({n - done, kPipeBytes - at, kPieceBytes});
    copy(at, done, size_t(some));
    done += some;
    moved.store(begin + uint64_t(done), std::memory_order_release);
    ring(i);
  }
  return std::max<int64_t>(0, n);
}

int64_t ShmRendezvous::pipe_write(int i, const void* data, int64_t bytes) {
  Pipe& to = pipe(index, i);
  const uint64_t held = to.written.load(std::memory_order_relaxed) - to.read.load(std::memory_order_acquire);
  return pass(i, to.written, std::min(bytes, kPipeBytes - int64_t(held)), [&](int64_t at, int64_t done, size_t some) {
    std::memcpy(to.data + at, static_cast<const uint8_t*>(data) + done, some);
  });
}

int64_t ShmRendezvous::pipe_read(int i, void* data, int64_t bytes) {
  Pipe& from = pipe(i, index);
  const uint64_t held = from.written.load(std::memory_order_acquire) - from.read.load(std::memory_order_relaxed);
  return pass(i, from.read, std::min(bytes, int64_t(held)), [&](int64_t at, int64_t done, size_t some) {
    std::memcpy(static_cast<uint8_t*>(data) + done, from.data + at, some);
  });
}

void ShmRendezvous::sleep(int64_t ns) {
  Signal& bell = line(index).bell;
  const uint32_t now = bell.value.load(std::memory_order_acquire);
  for (int polls = 0; polls < std::min(spins_, kBellPolls) && bell.value.load(std::memory_order_acquire) == heard_;
       polls++)
    cpu_pause();
  if (now == heard_) bell.sleep_while(now, ns);
  heard_ = bell.value.load(std::memory_order_acquire);
  check_given_up();
}

}  // namespace ckdist
