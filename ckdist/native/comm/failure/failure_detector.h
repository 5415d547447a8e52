// Heartbeats between the ranks of a job. They are sent by a separate thread, so they do not depend on the ranks' work.
//
// A killed rank is noticed at once: by its process on this host, by the end of its connection on another host. A
// stopped or unplugged rank is noticed by its silence, before the timeout. A rank that fails sends its reason. Every
// later call of all the job's communicators fails with that error. A clean close is not a failure.
//
// Ranks of this host send heartbeats through the rendezvous's memory. Other ranks use a separate connection, so that
// data does not delay heartbeats, or the transport's own heartbeats if it has them. A heartbeat holds the number of
// bytes that the rank has moved and the number of its steps: a rank continues to wait for a rank that makes progress.
// It also names the rank that the sender waits for: the end of such a chain is reported as lost.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/shm_rendezvous.h"
#include "comm/channel.h"

namespace ckdist {

class FailureDetector {
 public:
  // local: the ranks of `rendezvous` (null: none), in its order. Other ranks are reached over the transport.
  FailureDetector(int rank, int size, std::shared_ptr<ShmRendezvous> rendezvous, std::vector<int> local,
                  std::shared_ptr<Transport> transport, double timeout_s);
  ~FailureDetector();

  // Throws if a rank is lost. `call`: the waiting call, for the error.
  void check(const CallName& call = {}) const {
    if (lost()) fail_with_reason(call);
  }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  const char* reason() const { return reason_.c_str(); }  // valid if lost()
  uint64_t moved(int rank) const { return peers_[rank].moved.load(std::memory_order_relaxed); }

  // Publishes that this rank has waited long for `rank`. -1: it no longer waits.
  void wait_for(int rank) { waits_for_.store(rank, std::memory_order_relaxed); }
  // The end of the chain of waiting ranks that begins at `rank`. Returns `rank` itself if it waits for no rank, or for
  // this one.
  int blame(int rank) const {
    int last = rank;
    for (size_t hops = 0; hops < peers_.size(); hops++) {
      const int next = peers_[last].waits_for.load(std::memory_order_relaxed);
      if (next == rank_ || next == rank) return rank;  // a cycle: no single rank is lost
      if (next < 0 || next >= int(peers_.size())) break;
      last = next;
    }
    return last;
  }

  void give_up(const char* reason);  // sends the reason to all peers
  // Counts the communicators that use it. When the last one leaves, the peers are notified.
  void join() { users_++; }
  void leave();

 private:
  enum Kind : uint16_t { kHeartbeat = 1, kLeft, kGaveUp };
  static constexpr int kMaxText = 400;
  struct Frame {
    uint32_t magic;
    uint16_t kind, text_bytes;
    uint64_t moved;
    int32_t waits_for, pad;
    char text[kMaxText];
  };
  static constexpr int64_t kHead = 24;  // bytes of a frame before its text
  struct Peer {
    std::atomic<uint64_t> moved{0};
    std::atomic<int> waits_for{-1};
    int local = -1;                  // index in the rendezvous
    SealedSocket* socket = nullptr;  // of the transport
    int process = -1;                // pidfd
    bool gone = false;               // has left, or is already reported
    int64_t heard_ns = 0;
    uint64_t heartbeats = 0;  // of a local peer, at the last check
    int64_t got = 0;          // received bytes of `frame`
    Frame frame;
  };

  static bool is_sane(const Frame& frame);
  void run();
  void stop();
  void settle();
  void look_at_local(int r);
  void look_at_socket(int r);
  void look_at_transport(int r);
  void take_frame(int r);
  bool tell(Kind kind, const char* text);
  void report_lost(int r, const char* what);
  [[noreturn]] void fail_with_reason(const CallName& call) const;
  bool over_transport(int r) const { return r != rank_ && peers_[r].local < 0 && !peers_[r].socket; }

  const int rank_;
  const int64_t timeout_ns_;
  std::shared_ptr<ShmRendezvous> rendezvous_;
  std::shared_ptr<Transport> transport_;
  std::vector<Peer> peers_;  // by rank of the job
  std::string reason_;
  std::atomic<bool> lost_{false}, ending_{false}, is_leaving_{false};
  std::atomic<int> users_{0}, waits_for_{-1};
  std::mutex telling_;  // one writer at a time
  bool gave_up_ = false;
  int wake_;            // eventfd
  std::thread thread_;  // last member: it uses all of the above
};

}  // namespace ckdist
