// Rank 0's sign of life over MPI, from a thread of its own, whatever rank 0 does or does not do meanwhile.
//
// The other ranks answer while they wait for a message. So a rank without work notices a rank 0 that is gone, stopped or cut
// off (it hears nothing), and rank 0 notices such a rank (it does not answer). One message a second to each rank at most.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/mpi_calls.h"

namespace ckdist {

class MpiPulse {
 public:
  MpiPulse(const MpiCalls& calls, int size, int64_t timeout_ns);
  ~MpiPulse();

  // Throws when a rank did not answer within the timeout, not counting the time before `idle_since`, when ranks had work.
  void check(int64_t idle_since) const;
  // No more pulses; waits for the answers that are due. Throws when one does not come.
  void end();

 private:
  struct Peer {
    MpiRequest sent, answer;
    bool sending = false;
    int32_t room = 0;  // for the answer
    std::atomic<int64_t> asked_ns{0};  // 0: no answer is due
  };
  void run();
  void stop();
  void ask(int rank);
  bool answered(int rank);  // or not asked

  const MpiCalls calls_;
  const int64_t timeout_ns_;
  const int32_t pulse_ = kPulse;
  std::vector<Peer> peers_;  // by rank; that of rank 0 is not used
  std::mutex lock_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ckdist
