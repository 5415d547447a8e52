// A group of ranks as its algorithms see it: ranks counted from 0 within the group, messages that meet no other
// group's.
//
// Groups share one transport, which one thread uses at a time: every call takes its turn, and turns are fair, so a
// thread that waits for a long operation keeps nobody from beginning another.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "comm/transport.h"
#include "comm/waiting.h"

namespace ckdist {

class Pulse;

struct Wire {
  // pulse_sockets: by rank, a connection for signs of life alone, or none; they belong to the wire from here on.
  explicit Wire(std::unique_ptr<Transport> transport, std::vector<int> pulse_sockets = {})
      : transport(std::move(transport)), pulse_sockets(std::move(pulse_sockets)) {}
  ~Wire() {
    for (const int fd : pulse_sockets)
      if (fd >= 0) close(fd);
  }
  const std::unique_ptr<Transport> transport;
  const std::vector<int> pulse_sockets;
  std::atomic<uint32_t> next{0}, serving{0};
  int contexts = 1;  // groups made so far; agreed when a group is made
};

// Leave to use a wire's transport, for as long as it lives.
struct Turn {
  explicit Turn(Wire& wire) : wire(wire) {
    const uint32_t own = wire.next.fetch_add(1);
    for (int i = 0; wire.serving.load(std::memory_order_acquire) != own; i++)
      if (i > 100) sched_yield();
      else cpu_pause();
  }
  ~Turn() { wire.serving.fetch_add(1, std::memory_order_release); }
  Wire& wire;
};

class Channel {
 public:
  static constexpr int kUserTags = 1024, kFirstTag = 8;
  enum Purpose : int { kCollective = kUserTags, kHosts = kUserTags + 1, kPurposes = kUserTags + 8 };

  struct Pending {
    Transport::Request request;
    int peer;
  };

  // ranks: the transport's numbers of this group's ranks; names: the job's.
  Channel(std::shared_ptr<Wire> wire, int context, std::vector<int> ranks, std::vector<int> names, int rank,
          std::shared_ptr<Pulse> pulse, const Patience& patience);

  const int rank, size;
  int64_t timeout_ns() const { return wire_->transport->timeout_ns; }
  const std::shared_ptr<Wire>& wire() const { return wire_; }
  const std::vector<int>& ranks() const { return ranks_; }
  const char* name() const { return wire_->transport->name(); }

  // `tag`: one of the user's, or a Purpose.
  Pending isend(int peer, int tag, const void* data, int64_t bytes);
  Pending irecv(int peer, int tag, void* data, int64_t bytes);
  void mark(uint64_t signature) {
    mark_ = uint32_t(signature ^ signature >> 32) | 1;
  }  // of the collective whose messages follow
  bool test(Pending& pending);
  // `call` stands in errors. A slow link is no lost peer: time counts from the last byte that this rank, or the peer,
  // moved.
  void wait(Pending pending, const CallName& call) { wait(&pending, 1, call); }
  void wait(std::vector<Pending>& pending, const CallName& call) {  // for all; leaves none
    wait(pending.data(), pending.size(), call);
    pending.clear();
  }
  const Patience& patience() const { return patience_; }

  void expose(int window, void* base, int64_t bytes);
  Pending iput(int peer, int window, int64_t offset, const void* data, int64_t bytes);
  Pending iget(int peer, int window, int64_t offset, void* data, int64_t bytes);
  Pending inotify(int peer, int window, int slot);
  uint64_t notified(int window, int slot);
  void idle(int64_t ns);
  void abandon(const char* reason);  // tells the peers why this rank gives up, where the transport can
  bool register_memory(void* base, int64_t bytes);
  void forget_memory(void* base);

 private:
  void wait(Pending* pending, size_t count, const CallName& call);
  void wait(Pending& pending, const Pending* others, size_t count, const CallName& call);
  uint64_t moved(int peer) const;
  [[noreturn]] void fail_late(const Pending* pending, size_t count, const CallName& call);
  int on_wire(int tag) const { return kFirstTag + context_ * kPurposes + tag; }
  int window_on_wire(int window) const { return context_ * kUserTags + window; }

  std::shared_ptr<Wire> wire_;
  uint32_t mark_of(int tag) const { return tag < kUserTags ? 0 : mark_; }

  int context_;
  uint32_t mark_ = 0;
  std::vector<int> ranks_, names_;
  std::shared_ptr<Pulse> pulse_;
  const Patience patience_;
};

}  // namespace ckdist
