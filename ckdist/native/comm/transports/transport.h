// Moves bytes between two ranks: the only part that differs between TCP, RDMA verbs and MPI. All algorithms use this
// interface.
//
// Calls start an operation and return at once. `test` makes progress on all operations in flight and never blocks.
// Messages between two ranks with one tag arrive in order. A failure throws Error(Status::comm), which names the peer.
// One thread uses a transport at a time: if several communicators share it, each call takes a Turn.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "comm/transports/sealed_socket.h"
#include "core/futex.h"

namespace ckdist {

class Transport {
 public:
  using Request = uint64_t;  // 0: already complete

  Transport(int rank, int size, double timeout_s) : rank(rank), size(size), timeout_ns(int64_t(timeout_s * 1e9)) {}
  virtual ~Transport() = default;
  const int rank, size;
  const int64_t timeout_ns;  // maximum time of a wait for a peer

  // `data` must not change until the request is complete.
  virtual Request isend(int peer, int tag, const void* data, int64_t bytes) = 0;
  virtual Request irecv(int peer, int tag, void* data, int64_t bytes) = 0;

  // Identifies the call of the next isend or irecv; 0: none. If the transport can check it, a message of another call
  // is an error.
  uint32_t mark = 0;

  // Exposes memory of this rank that peers may read and write, with the same `window` number on every rank. A
  // collective call. Offsets of iput and iget must lie within the exposed memory.
  virtual void expose(int window, void* base, int64_t bytes) = 0;
  virtual Request iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) = 0;
  virtual Request iget(int peer, int window, int64_t offset, void* data, int64_t bytes) = 0;
  // Counters of a window, numbered from slot 0 on.
  static constexpr int kWindowSlots = 1 << 16;
  static void check_slot(int slot);
  // Adds 1 to the peer's counter `slot` of a window, after all earlier puts to it are visible there.
  virtual Request inotify(int peer, int window, int slot) = 0;
  virtual uint64_t notified(int window, int slot) = 0;  // this rank's counter

  // Returns true once complete, and forgets the request. Makes progress.
  virtual bool test(Request request) = 0;
  // Called if nothing is in flight: may sleep up to `ns` before the caller polls again. Transports with file
  // descriptors wait on them.
  virtual void idle(int64_t ns) = 0;

  // Registers memory for many operations once, for transports that need registration. It must stay mapped until
  // forget_memory(). Returns false if the transport needs none.
  virtual bool register_memory(void*, int64_t) { return false; }
  virtual void forget_memory(void*) {}

  // Returns false while a peer may lack data or heartbeats that this rank has sent. Any thread may ask.
  virtual bool has_settled(int) { return true; }
  // Replaces the connection to a peer if it carries nothing, though heartbeats pass. One thread calls it.
  virtual void mend_stalled(int) {}

  // Sends the reason why this rank fails to its peers, if possible.
  virtual void abandon(const char*) {}

  // The reason why a receive of `bytes` bytes in the call `mark` refuses a message, or "". It follows the peer's name.
  static std::string mismatch(int64_t sent, uint32_t sent_mark, int64_t bytes, uint32_t mark);

  // Polls until complete. The last argument names the operation in the error, for example "all_reduce 17, step 2".
  void wait(Request request, int peer, const char* what);

  // Heartbeats: short messages that may be lost. receive_heartbeat returns the bytes of one, or 0. The peers of
  // transports without heartbeats are watched in another way (comm/failure/failure_detector.h).
  virtual bool has_heartbeats() const { return false; }
  virtual void send_heartbeat(int, const void*, int64_t) {}
  virtual int64_t receive_heartbeat(int, void*, int64_t) { return 0; }

  // Bytes sent and received so far, without heartbeats, and number of steps. While they grow, no wait times out.
  std::atomic<uint64_t> moved{0}, steps{0};
  uint64_t signs() const { return moved.load(std::memory_order_relaxed) + steps.load(std::memory_order_relaxed); }
  void add_moved(int64_t bytes) {
    moved.store(moved.load(std::memory_order_relaxed) + uint64_t(bytes), std::memory_order_relaxed);
  }

  virtual const char* name() const = 0;  // "tcp", "verbs", "mpi"

  std::vector<std::string> hosts;   // the ranks' machine names, for errors; or empty
  std::string who(int peer) const;  // "rank 1 (on node7)"

  std::deque<SealedSocket> heartbeat_sockets;  // by rank: a connection only for heartbeats; or empty
  int contexts = 1;  // number of communicators so far; all ranks agree on it when one is created

 private:
  friend struct Turn;
  std::atomic<uint32_t> next_turn_{0}, turn_{0};
};

// The right to use a transport during its lifetime. Turns are fair: a thread that waits for a long operation does not
// block others.
struct Turn {
  explicit Turn(Transport& transport) : transport(transport) {
    const uint32_t own = transport.next_turn_.fetch_add(1);
    for (int i = 0; transport.turn_.load(std::memory_order_acquire) != own; i++)
      if (i > 100) sched_yield();
      else cpu_pause();
  }
  ~Turn() { transport.turn_.fetch_add(1, std::memory_order_release); }
  Transport& transport;
};

}  // namespace ckdist
