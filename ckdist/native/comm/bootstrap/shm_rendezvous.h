// The shared-memory rendezvous of a communicator's ranks on one host: a flag per rank on its own cache line with a
// record beside it, slots in which values are staged, eager messages and byte pipes between every two ranks.
//
// Epochs count the barriers. A rank posts epoch e only after it saw all peers at e - 1, so it may use slot e % kSlots
// again: all peers have finished with what lay there at e - 3. A peer that died, gave up or stalls is an Error(comm)
// that names it.
//
// Eager messages: small values that every rank sends to every other. Two ranks have two boxes. Each fills for the next
// message the box that it has just read: its lines are in this core's cache then, and only lines with data travel. A
// rank that has its peer's message knows that the peer has read the one before, so no other wait is needed.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/bootstrap/segment.h"
#include "comm/failure/waiting.h"

namespace ckdist {

class FailureDetector;

struct ShmFlag {  // as core/futex.h's Signal, with what it announces on the same cache line
  std::atomic<uint32_t> count, sleepers;
  void raise(uint32_t count);
  bool reached(uint32_t n) const { return int32_t(count.load(std::memory_order_acquire) - n) >= 0; }
};

class ShmRendezvous {
 public:
  static constexpr int kSlots = 3;
  static constexpr int64_t kSlotBytes = Segment::kHugePage / kSlots / 4096 * 4096;  // a rank's slots: one huge page
  static constexpr int64_t kPipeBytes = 64 << 10;
  static constexpr int64_t kEagerBytes = 32 << 10;
  static constexpr int64_t kForever = -1;  // as a grace: no timeout, for a rank that waits for work

  struct Record {        // what a rank tells its peers when it arrives
    int64_t in, out;     // offsets in its arena; negative: elsewhere
    uint64_t signature;  // of the call: it must be the same everywhere
  };
  struct Pipe;
  struct EagerBox;

  // `index` of `ranks`; 0 creates the segment. `spins`: polls before a waiting thread sleeps.
  ShmRendezvous(const std::string& path, int index, const std::vector<int>& ranks, int spins, double timeout_s);

  const int index, size;
  const std::string& path() const { return segment_.path(); }
  uint32_t next() const { return epoch_ + 1; }
  uint8_t* slot(int i, uint32_t epoch) const { return slots_ + i * Segment::kHugePage + epoch % kSlots * kSlotBytes; }

  // The call's name and number stand in errors.
  void begin(const char* name) { call_ = {name, int64_t(++calls_)}; }
  void name_call(const CallName& call) { call_ = call; }
  uint64_t calls() const { return calls_; }    // begun, on all ranks alike
  int name(int i) const { return ranks_[i]; }  // the job's number of rank i
  uint32_t post(const Record& record);
  void await(uint32_t epoch);  // until all peers have posted it; their signatures must equal this rank's
  void meet() { await(post(own_)); }
  // A barrier of a step. `grace_ns`: what a peer may take beyond the timeout, because it waits for other hosts itself;
  // `idle` is called between polls. No record is posted, so each rank's line changes once. With a record it changes
  // twice under its peers' polls (measured: a twelfth slower).
  void barrier(int64_t grace_ns, Idle idle);
  const Record& record(int i, uint32_t epoch) const;

  // Until a flag of rank i, in memory that these ranks share, has reached `count`.
  void await(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns = 0);

  // One eager message to every peer and from every peer: a peer's lies at await_eager(i), and stays until the message
  // after the next.
  void begin_eager(uint64_t signature);
  void send_eager(int i, const void* data, int64_t bytes);
  uint8_t* await_eager(int i);

  // Called every millisecond while a rank waits: it answers its peers' one-sided messages.
  void serve_with(std::function<void()> serve) { serve_ = std::move(serve); }

  void abandon(const char* reason);
  void check_alive(int i) const;
  void check_given_up() const;  // throws a peer's reason; to be called before its memory is found wrong

  // Heartbeats (comm/failure/failure_detector.h): this rank's, and what rank i shows of itself.
  struct Life {
    int pid;
    uint64_t start, heartbeats, moved;
    int waits_for;
    bool abandoned, left;
  };
  void heartbeat(uint64_t moved, int waits_for);
  void leave();
  Life life(int i) const;
  std::string reason(int i) const;                                 // why it gave up
  void watch(FailureDetector* detector) { detector_ = detector; }  // looked at while a rank waits

  // Bytes from rank i to this one, and from this one to rank i; both return how many went through.
  int64_t pipe_write(int i, const void* data, int64_t bytes);
  int64_t pipe_read(int i, void* data, int64_t bytes);
  double round_trip(int calls);  // seconds; a call of all ranks, between collectives
  // A probe of cache distance (comm/algorithms/cache_distance.h): a line that both write before they post, and the
  // nanoseconds that fetching the peer's takes; -1: it has not written.
  void write_probe();
  int64_t read_probe(int i) const;
  // Until something was written to one of this rank's pipes or room was made in one, at most so long.
  void sleep(int64_t ns);

 private:
  struct Line;
  static int64_t bytes_for(int size);
  Line& line(int i) const;
  Pipe& pipe(int from, int to) const;
  EagerBox& eager_box(int from, int to, uint32_t count) const;
  void ring(int i) const;  // tells rank i that a pipe changed
  template <class Idle>
  void wait_for(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns, Idle&& idle);
  void sleep_until(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns);
  [[noreturn]] void fail_other_call(int i) const;
  [[noreturn]] void fail_late(int i) const;

  std::vector<int> ranks_;
  int spins_;
  int64_t timeout_ns_;
  Segment segment_;
  uint8_t* slots_;
  uint8_t* pipes_;
  uint8_t* boxes_;
  uint32_t epoch_ = 0, eager_sent_ = 0;
  uint32_t heard_ = 0;
  Record own_{-1, -1, 0};
  std::function<void()> serve_;
  FailureDetector* detector_ = nullptr;
  std::once_flag abandoned_;
  CallName call_{"start-up"};
  uint64_t calls_ = 0;
};

}  // namespace ckdist
