// The messages of a communicator: ranks are numbered from 0 within it, and its tags differ from those of other
// communicators.
#pragma once
#include <memory>
#include <vector>

#include "comm/failure/waiting.h"
#include "comm/transports/transport.h"

namespace ckdist {

class FailureDetector;

class Channel {
 public:
  static constexpr int kUserTags = 1024, kFirstTag = 8;
  enum Purpose : int { kCollective = kUserTags, kHosts = kUserTags + 1, kPurposes = kUserTags + 8 };

  struct Pending {
    Transport::Request request;
    int peer;
  };

  // ranks: transport ranks of the members. names: their ranks in the job.
  Channel(std::shared_ptr<Transport> transport, int context, std::vector<int> ranks, std::vector<int> names, int rank,
          std::shared_ptr<FailureDetector> detector, const Patience& patience);

  const int rank, size;
  int64_t timeout_ns() const { return transport_->timeout_ns; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }
  const std::vector<int>& ranks() const { return ranks_; }
  const char* name() const { return transport_->name(); }

  // `tag`: a user's tag, or a Purpose.
  Pending isend(int peer, int tag, const void* data, int64_t bytes);
  Pending irecv(int peer, int tag, void* data, int64_t bytes);
  void mark(uint64_t signature) {
    mark_ = uint32_t(signature ^ signature >> 32) | 1;
  }  // signature of the collective whose messages follow
  bool test(Pending& pending);
  // `call` is named in errors. A slow link is not a lost peer: the timeout starts at the last byte that this rank or
  // the peer moved.
  void wait(Pending pending, const CallName& call) { wait(&pending, 1, call); }
  void wait(std::vector<Pending>& pending, const CallName& call) {  // waits for all and clears the list
    wait(pending.data(), pending.size(), call);
    pending.clear();
  }
  const Patience& patience() const { return patience_; }
  // Shows the peers that this rank has made a step.
  void count_step() { transport_->steps.fetch_add(1, std::memory_order_relaxed); }

  void expose(int window, void* base, int64_t bytes);
  Pending iput(int peer, int window, int64_t offset, const void* data, int64_t bytes);
  Pending iget(int peer, int window, int64_t offset, void* data, int64_t bytes);
  Pending inotify(int peer, int window, int slot);
  uint64_t notified(int window, int slot);
  void idle(int64_t ns, const CallName& call = {});
  // Sends the reason why this rank stops to the peers, if the transport can.
  void abandon(const char* reason);
  bool register_memory(void* base, int64_t bytes);
  void forget_memory(void* base);

 private:
  void wait(Pending* pending, size_t count, const CallName& call);
  void wait(Pending& pending, const Pending* others, size_t count, const CallName& call);
  uint64_t moved(int peer) const;
  [[noreturn]] void fail_late(const Pending* pending, size_t count, const CallName& call);
  int transport_tag(int tag) const { return kFirstTag + context_ * kPurposes + tag; }
  int transport_window(int window) const { return context_ * kUserTags + window; }

  uint32_t mark_of(int tag) const { return tag < kUserTags ? 0 : mark_; }

  std::shared_ptr<Transport> transport_;
  int context_;
  uint32_t mark_ = 0;
  std::vector<int> ranks_, names_;
  std::shared_ptr<FailureDetector> detector_;
  const Patience patience_;
};

}  // namespace ckdist
