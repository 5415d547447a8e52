// The ranks of one host, meeting at flags in one shared-memory segment: a barrier, a mailbox, and who is still alive.
//
// Ranks are processes, or threads of one process with an object each. A host with one rank is possible, and then
// nothing waits.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "comm/segment.h"
#include "core/futex.h"

namespace ckdist {

class Pulse;

class HostRanks {
 public:
  // `index` of `ranks`, which are their numbers in the whole job. Index 0 creates the segment and ignores `path`; the
  // others get its path() by the caller's means, and index 0 must live until all of them have opened it. `spins`: polls
  // before a waiting thread sleeps.
  HostRanks(const std::string& path, int index, std::vector<int> ranks, int spins, double timeout_s);
  const int index, size;
  const std::string& path() const { return control_->path(); }

  // Zeros that all share; a collective call, once. The last `mailbox_ints` of them are the mailbox.
  uint8_t* share(int64_t bytes, int64_t mailbox_ints);

  // A barrier. `step` names the place in error messages; `grace_ns`: what a peer may take beyond the timeout, because
  // it waits itself.
  void meet(int step, int64_t grace_ns = 0, Idle idle = {});

  // Index 0 gives every other rank one message; the others wait for it, mostly asleep, and have it until they receive
  // the next.
  void publish(const int32_t* message, int64_t ints);
  const int32_t* receive(int64_t* ints);

  // Throws when a peer is known to be dead, has given up, or has been stopped for longer than the timeout.
  void check();
  // Signs of life of the whole job, asked while this rank waits.
  void watch(Pulse* pulse) { pulse_ = pulse; }
  // Tells the peers that this rank cannot go on, and why.
  void abandon(const char* reason);

 private:
  struct Line;  // one rank's flags
  struct Header;
  void wait_for(Signal& signal, uint32_t count, int i, int step, int64_t grace_ns = 0, Idle idle = {});
  void check_alive(int i, int step);
  void check_awake(int i);
  void check_pulse(int i, int step, int64_t waited_ns);

  std::vector<int> ranks_;
  Pulse* pulse_ = nullptr;
  int spins_;
  int64_t timeout_ns_, mailbox_ints_ = 0;
  uint32_t epoch_ = 0, message_ = 0;  // barriers this rank has begun, messages it has seen
  std::optional<Segment> control_, data_;
  Header* header_ = nullptr;
  int32_t* mailbox_ = nullptr;          // the message being handed over
  std::vector<int32_t> received_;       // the message this rank has
  std::vector<int64_t> stopped_since_;  // when each peer was first seen stopped, else 0
};

}  // namespace ckdist
