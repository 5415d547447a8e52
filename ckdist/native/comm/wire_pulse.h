// Rank 0's sign of life, from a thread of its own, whatever rank 0 does or does not do between steps.
//
// The first rank of every other host answers while it waits for a message. So a rank without work notices a rank 0 that is gone,
// stopped or cut off (it hears nothing), and rank 0 notices such a rank (it does not answer). In a step nothing is sent: there the
// step's own messages tell. One message a second to each host at most.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.h"

namespace ckdist {

constexpr int64_t kFrameInts = 256;  // a message's first frame: its length or kPulse, then the message or its beginning
constexpr int32_t kPulse = -1;       // in place of a message's length: rank 0 is well, answer

enum WireTag : int { kTagFrame = 8, kTagBody, kTagAnswer, kTagShare, kTagSum, kTagSlice, kTagTotal, kTagLogits };

class WirePulse {
 public:
  WirePulse(Transport& transport, std::vector<int> peers, int64_t timeout_ns);
  ~WirePulse();

  // Between these two the transport is the caller's alone.
  void pause();
  void resume();
  // Throws when the transport failed, or a peer did not answer within the timeout, not counting the time before `idle_since`.
  void check(int64_t idle_since);
  // No more pulses; waits for the answers that are due. Throws when one does not come. The transport is the caller's from here on.
  void end();

 private:
  struct Peer {
    int rank;
    Transport::Request sent = 0, answer = 0;
    int32_t room = 0;      // for the answer
    int64_t asked_ns = 0;  // 0: no answer is due
  };
  void run();
  void stop();
  int unanswered();  // asks the transport
  void ask(Peer& peer);

  Transport& transport_;
  const int64_t timeout_ns_;
  int32_t frame_[kFrameInts] = {kPulse};
  std::vector<Peer> peers_;
  std::mutex lock_;  // of all here, and of the transport while it is not paused
  std::condition_variable wake_;
  bool paused_ = false, ending_ = false;
  std::string failure_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ckdist
