// Moves bytes between two ranks: the only thing that differs between TCP, RDMA verbs and MPI. Algorithms are written
// once over this.
//
// Calls begin an operation and return at once; `test` makes progress on everything that is under way and never blocks.
// Messages between two ranks with one tag arrive in the order they were sent. A failure throws Error(Status::comm)
// that names the peer. One thread uses a transport at a time: where several communicators share it, each call takes a
// Turn.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/futex.h"

namespace ckdist {

class Transport {
 public:
  using Request = uint64_t;  // 0: complete already

  Transport(int rank, int size, double timeout_s) : rank(rank), size(size), timeout_ns(int64_t(timeout_s * 1e9)) {}
  virtual ~Transport() {
    for (const int fd : heartbeat_sockets)
      if (fd >= 0) close(fd);
  }
  const int rank, size;
  const int64_t timeout_ns;  // that any wait for a peer may take

  // `data` must stay as it is until the request is complete.
  virtual Request isend(int peer, int tag, const void* data, int64_t bytes) = 0;
  virtual Request irecv(int peer, int tag, void* data, int64_t bytes) = 0;

  // What the next isend or irecv belongs to; 0: nothing. Where the transport can tell, a message of something else is
  // an error.
  uint32_t mark = 0;

  // Memory of this rank that peers may read and write, the same `window` number on every rank; a collective call.
  // Offsets of iput and iget lie within what the peer exposed.
  virtual void expose(int window, void* base, int64_t bytes) = 0;
  virtual Request iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) = 0;
  virtual Request iget(int peer, int window, int64_t offset, void* data, int64_t bytes) = 0;
  // A window has this many counters, from slot 0 on.
  static constexpr int kWindowSlots = 1 << 16;
  static void check_slot(int slot);
  // Adds one to the peer's counter `slot` of a window after everything put to it before is visible there.
  virtual Request inotify(int peer, int window, int slot) = 0;
  virtual uint64_t notified(int window, int slot) = 0;  // this rank's counter

  // True once complete; the request is then forgotten. Makes progress.
  virtual bool test(Request request) = 0;
  // Nothing is under way: may the caller sleep a little before it polls again? Transports with a file descriptor wait
  // on it.
  virtual void idle(int64_t ns) = 0;

  // Memory that many operations will use, told once so that a transport that must know memory does not learn it anew
  // each time; it stays mapped until it is forgotten. False: this transport needs none.
  virtual bool register_memory(void*, int64_t) { return false; }
  virtual void forget_memory(void*) {}

  // Tells the peers why this rank gives up, where the transport can.
  virtual void abandon(const char*) {}

  // Polls until complete. `what` names the operation in the error: "all_reduce 17, step 2".
  void wait(Request request, int peer, const char* what);

  // Short signs of life, which may be lost; receive_heartbeat returns the bytes of one, or 0. Transports without have
  // their peers watched otherwise (comm/failure/failure_detector.h).
  virtual bool has_heartbeats() const { return false; }
  virtual void send_heartbeat(int, const void*, int64_t) {}
  virtual int64_t receive_heartbeat(int, void*, int64_t) { return 0; }

  // Bytes sent and received so far, without heartbeats, and steps made. While they grow, no wait is too long.
  std::atomic<uint64_t> moved{0}, steps{0};
  uint64_t signs() const { return moved.load(std::memory_order_relaxed) + steps.load(std::memory_order_relaxed); }
  void add_moved(int64_t bytes) {
    moved.store(moved.load(std::memory_order_relaxed) + uint64_t(bytes), std::memory_order_relaxed);
  }

  virtual const char* name() const = 0;  // "tcp", "verbs", "mpi"

  std::vector<std::string> hosts;   // the ranks' machines by name, for errors; empty: not told
  std::string who(int peer) const;  // "rank 1 (on node7)"

  std::vector<int> heartbeat_sockets;  // by rank, a connection for heartbeats alone, or none; they belong to this
  int contexts = 1;                    // communicators made so far; agreed when one is made

 private:
  friend struct Turn;
  std::atomic<uint32_t> next_turn_{0}, turn_{0};
};

// Leave to use a transport, for as long as it lives. Turns are fair, so a thread that waits for a long operation keeps
// nobody from beginning another.
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
