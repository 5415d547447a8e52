// Signs of life between the ranks of a job, from a thread of their own, whatever the ranks do meanwhile.
//
// A killed rank is noticed at once (its process on this host, the end of its connection on another), a stopped or
// unplugged one by its silence, before the timeout is over; a rank that gives up says why. The verdict stands in every
// later call of all the job's communicators. A rank that leaves in order is missed by nobody.
//
// Ranks of this host beat in the meeting's memory, others over a connection that carries nothing else (so no data is in
// the way), or over the transport where it has beats. A beat tells how many bytes the rank has moved: who waits for a
// rank whose bytes flow waits on. It tells for whom the rank waits, too: the one to blame is the one at the end of such
// a chain.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/channel.h"
#include "comm/meeting.h"

namespace ckdist {

class Pulse {
 public:
  // local: the ranks of `meeting` (null: none), in its order; the rest is reached by the wire, as it can.
  Pulse(int rank, int size, std::shared_ptr<Meeting> meeting, std::vector<int> local, std::shared_ptr<Wire> wire,
        double timeout_s);
  ~Pulse();

  // Throws when a rank is lost; `call`: the one that waits.
  void check(const CallName& call = {}) const {
    if (lost()) fail_with_reason(call);
  }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  const char* reason() const { return reason_.c_str(); }  // once lost
  uint64_t moved(int rank) const { return peers_[rank].moved.load(std::memory_order_relaxed); }

  // This rank has waited long for `rank`; -1: no longer.
  void wait_for(int rank) { waits_for_.store(rank, std::memory_order_relaxed); }
  // Whom `rank` waits for, and that one, and so on: who keeps all of them. `rank` itself when it waits for nobody, or
  // for this one.
  int blame(int rank) const {
    int last = rank;
    for (size_t hops = 0; hops < peers_.size(); hops++) {
      const int next = peers_[last].waits_for.load(std::memory_order_relaxed);
      if (next == rank_ || next == rank) return rank;  // a circle: all wait, and nobody alone is to blame
      if (next < 0 || next >= int(peers_.size())) break;
      last = next;
    }
    return last;
  }

  void give_up(const char* reason);  // tells everyone
  // Communicators that use it; when the last has left, the peers are told so.
  void join() { users_++; }
  void leave();

 private:
  enum Kind : uint16_t { kBeat = 1, kLeft, kGaveUp };
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
    int local = -1;  // its place in the meeting
    int socket = -1;
    int process = -1;   // pidfd
    bool gone = false;  // left, or reported already
    int64_t heard_ns = 0;
    uint64_t beats = 0;  // of a local one, when last looked at
    int64_t got = 0;     // bytes of `frame`
    Frame frame;
  };

  void run();
  void stop();
  void beat();
  void look_local(int r);
  void look_socket(int r);
  void look_wire(int r);
  void tell(Kind kind, const char* text);
  void verdict(int r, const char* what);
  [[noreturn]] void fail_with_reason(const CallName& call) const;
  bool on_wire(int r) const { return r != rank_ && peers_[r].local < 0 && peers_[r].socket < 0; }

  const int rank_;
  const int64_t timeout_ns_;
  std::shared_ptr<Meeting> meeting_;
  std::shared_ptr<Wire> wire_;
  std::vector<Peer> peers_;  // by rank of the job
  std::string reason_;
  std::atomic<bool> lost_{false}, ending_{false};
  std::atomic<int> users_{0}, waits_for_{-1};
  std::mutex telling_;  // one writer at a time
  bool gave_up_ = false;
  int wake_;            // eventfd
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ckdist
