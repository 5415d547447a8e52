// The shared-memory rendezvous of a communicator's ranks on one host: a flag and a record per rank on a cache line of
// their own, slots for staging values, and eager messages and byte pipes between every two ranks.
//
// Epochs count the barriers. A rank posts epoch e only after all peers have posted e - 1. So it may use slot e % kSlots
// again: all peers have finished with the data of e - 3. If a peer has died, failed or stalled, calls throw an
// Error(comm) that names it.
//
// Eager messages are small values that every rank sends to every other. Two ranks have two boxes. For the next message,
// a rank fills the box that it has just read: its lines are in this core's cache, and only lines with data move. A rank
// that has received its peer's message knows that the peer has read the one before, so no other synchronization is
// needed.
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

struct ShmFlag : SignalWord {  // a counter, with its data on the same cache line
  bool reached(uint32_t n) const { return int32_t(value.load(std::memory_order_acquire) - n) >= 0; }
};

class ShmRendezvous {
 public:
  static constexpr int kSlots = 3;
  static constexpr int64_t kSlotBytes = Segment::kHugePage / kSlots / 4096 * 4096;  // a rank's slots: one huge page
  static constexpr int64_t kPipeBytes = 64 << 10;
  static constexpr int64_t kEagerBytes = 32 << 10;
  static constexpr int64_t kForever = -1;  // value of grace_ns without a timeout, for a rank that waits for work

  struct Record {            // published when a rank arrives
    int64_t in, out;         // offsets in its arena; negative: outside
    uint64_t signature = 0;  // of the call; post() sets it. It must be equal on all ranks
  };
  struct Pipe;
  struct EagerBox;

  // `index`: this rank's index in `ranks`; index 0 creates the segment. `spins`: polls before a waiting thread sleeps.
  ShmRendezvous(const std::string& path, int index, const std::vector<int>& ranks, int spins, double timeout_s);

  const int index, size;
  const std::string& path() const { return segment_.path(); }
  uint32_t next() const { return epoch_ + 1; }
  uint8_t* slot(int i, uint32_t epoch) const { return slots_ + i * Segment::kHugePage + epoch % kSlots * kSlotBytes; }

  // Begins a call. Its name and number are for errors.
  void begin(const char* name, uint64_t signature) {
    call_ = {name, int64_t(++calls_)};
    own_ = {-1, -1, signature};
  }
  void name_call(const CallName& call) { call_ = call; }
  uint64_t calls() const { return calls_; }    // number of calls so far, the same on all ranks
  int name(int i) const { return ranks_[i]; }  // rank i's rank in the job
  // Posts this rank's record and waits until all peers have posted theirs. Checks that their signatures are equal.
  // Returns the epoch.
  uint32_t meet(const Record& record);
  void meet() { meet(own_); }
  // A barrier of a step. `grace_ns`: extra time of a peer after the timeout, because it may wait for other hosts
  // itself. `idle` is called between polls. No record is posted, so each rank's line changes once; with a record it
  // would change twice during its peers' polls (measured: 1/12 slower).
  void barrier(int64_t grace_ns, Idle idle);
  const Record& record(int i, uint32_t epoch) const;

  // Waits until a flag of rank i, in memory that these ranks share, has reached `count`.
  void await(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns = 0);

  // One eager message to and from every peer. A peer's message is at await_eager(i), and stays until the message after
  // the next.
  void begin_eager() { eager_sent_++; }
  void send_eager(int i, const void* data, int64_t bytes);
  uint8_t* await_eager(int i);

  // Sets a function that is called every millisecond while a rank waits. It answers the peers' one-sided messages.
  void serve_with(std::function<void()> serve) { serve_ = std::move(serve); }

  void abandon(const char* reason);
  void check_alive(int i) const;
  // Throws unless rank i sent the bytes that rank j expected in all_to_all: the reason of a peer that gave up, else
  // both numbers.
  void check_sent(int i, int64_t sent, int j, int64_t expected) const;

  // Heartbeats (comm/failure/failure_detector.h): publishes this rank's, and reads rank i's.
  struct Life {
    int pid;
    uint64_t start, heartbeats, moved;
    int waits_for;
    bool abandoned, left;
  };
  void heartbeat(uint64_t moved, int waits_for);
  void leave();
  Life life(int i) const;
  std::string reason(int i) const;                                 // why it failed
  void watch(FailureDetector* detector) { detector_ = detector; }  // checked while a rank waits

  // pipe_write: bytes from this rank to rank i. pipe_read: bytes from rank i to this one. Both return the number of
  // bytes moved.
  int64_t pipe_write(int i, const void* data, int64_t bytes);
  int64_t pipe_read(int i, void* data, int64_t bytes);
  double round_trip(int calls);  // seconds; all ranks call it, between collectives
  // A probe of cache distance (comm/algorithms/cache_distance.h): a line that each rank writes before it posts.
  // read_probe: nanoseconds of reading the peer's line, or -1 if it was not written.
  void write_probe();
  int64_t read_probe(int i) const;
  // Sleeps until one of this rank's pipes has new data or room, at most `ns`.
  void sleep(int64_t ns);

 private:
  struct Line;
  static int64_t bytes_for(int size);
  Line& line(int i) const;
  Pipe& pipe(int from, int to) const;
  EagerBox& eager_box(int from, int to, uint32_t count) const;
  void ring(int i) const;  // notifies rank i that a pipe has changed
  template <class Copy>
  int64_t pass(int i, std::atomic<uint64_t>& moved, int64_t n, const Copy& copy);
  template <class Idle>
  void wait_for(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns, Idle&& idle);
  void sleep_until(ShmFlag& flag, uint32_t count, int i, int64_t grace_ns);
  void check_given_up() const;  // throws a peer's reason
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
  Record own_{-1, -1};
  std::function<void()> serve_;
  FailureDetector* detector_ = nullptr;
  std::once_flag abandoned_;
  CallName call_{"start-up"};
  uint64_t calls_ = 0;
};

}  // namespace ckdist
