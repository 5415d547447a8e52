// All communication of serving and training: the operations of MPI and NCCL, blocking and non-blocking, over any
// transport.
//
// One host uses shared memory. Several hosts use a transport, and shared memory inside each host. Or only the transport
// is used. The results are identical bit for bit (comm/algorithms/order.h). A thread of the communicator runs
// non-blocking collectives one after the other, in the order of the calls; blocking ones wait for them. Messages and
// windows are independent of both. Inference steps use a view without allocations (comm/step_communicator.h).
//
// After the first failure a communicator notifies its peers, and every later call fails with the same error.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/algorithms/collectives.h"
#include "comm/algorithms/order.h"
#include "comm/bootstrap/host_memory.h"
#include "comm/bootstrap/shm_rendezvous.h"
#include "comm/channel.h"
#include "comm/failure/failure_detector.h"
#include "comm/step_communicator.h"

namespace ckdist {

class Communicator {
 public:
  class Operation;  // an operation in flight, to test or to wait for

  struct Parts {
    int rank = 0;
    std::vector<int> host_of;                   // by rank
    std::shared_ptr<ShmRendezvous> rendezvous;  // of this host's ranks; null: only the transport
    // With a rendezvous the memory that its ranks share, else an arena of this rank, for a transport that registers
    // memory; or null.
    std::shared_ptr<HostMemory> memory;
    std::vector<int> arenas;               // arenas of this host's ranks, in rank order
    std::shared_ptr<Transport> transport;  // null: one host
    int context = 0;
    std::vector<int> transport_ranks;           // by rank
    std::vector<int> names;                     // ranks in the job, by rank; set if detector is
    std::shared_ptr<FailureDetector> detector;  // null: this is the job's first communicator, which creates it
    Thresholds thresholds;
    int spins = 0;
    double timeout_s = 30;
  };
  explicit Communicator(Parts parts);
  ~Communicator();

  const int rank, size;
  // "shared memory", "tcp", or "shared memory and tcp".
  const std::string& transport() const { return transport_; }
  int64_t timeout_ns() const { return channel_->timeout_ns(); }

  // Runs collectives (see comm/algorithms/collectives.h) in `body` on the calling thread.
  void run(const std::function<void(Collectives&)>& body);
  std::shared_ptr<Operation> begin(std::function<void(Collectives&)> body);

  // tag: 0 to 1023. Until the operation is complete, do not change data that is sent, and do not read data that is
  // received.
  std::shared_ptr<Operation> isend(int peer, int tag, const void* data, int64_t bytes);
  std::shared_ptr<Operation> irecv(int peer, int tag, void* data, int64_t bytes);

  // Windows have numbers from 0 to 1023. expose() is a collective call.
  void expose(int window, void* base, int64_t bytes);
  std::shared_ptr<Operation> iput(int peer, int window, int64_t offset, const void* data, int64_t bytes);
  std::shared_ptr<Operation> iget(int peer, int window, int64_t offset, void* data, int64_t bytes);
  std::shared_ptr<Operation> inotify(int peer, int window, int slot);
  void await_notified(int window, int slot, uint64_t count);  // until this rank's counter has reached `count`

  // A new communicator for each color, ordered by key and then by rank. Returns null for a negative color. A collective
  // call.
  std::unique_ptr<Communicator> split(int color, int key);

  // The view of this communicator for inference steps. This communicator must outlive it. A collective call.
  std::unique_ptr<StepCommunicator> steps(const StepSizes& sizes);

  // Memory in this rank's arena, which peers or the transport access in place. Null if there is no arena.
  void* allocate(int64_t bytes);
  void release(void* data);
  void abandon(const char* reason);
  void check_peers();            // throws if a rank of the job is lost; for waiting outside of calls
  void leave();                  // after the last call: peers no longer expect heartbeats
  double round_trip(int calls);  // seconds of a cache line's round trip between the host's first two ranks

 private:
  template <class Body>
  auto guarded(Body&& body);
  void work();
  void check_peer(int peer, int tag) const;
  int next_context();
  template <class T>
  std::vector<T> gather(const T& own);
  std::shared_ptr<Operation> message(const std::function<Channel::Pending()>& start);

  struct Place {
    int64_t offset, bytes;
  };  // offset of a rank's window in its arena; -1: outside
  uint8_t* in_reach(int peer, int window, int64_t offset, int64_t bytes);  // null: messages are needed

  Parts parts_;
  Order order_;
  std::shared_ptr<Channel> channel_;
  std::string transport_;
  std::unique_ptr<Collectives> collectives_;
  std::mutex running_;  // held during a collective
  // Read without the lock, so that calls which do not use them cost nothing.
  std::atomic<bool> failed_{false}, has_worker_{false}, left_{false};

  std::mutex mutex_;  // protects all members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::string failure_;
  std::map<int, std::vector<Place>> windows_;
  bool leaving_ = false;
  std::thread worker_;
};

class Communicator::Operation {
 public:
  bool test();
  void wait();

 private:
  friend class Communicator;
  Communicator* communicator;
  std::function<void(Collectives&)> body;  // a collective; empty for a message
  Channel::Pending pending{0, 0};
  bool done = false;
  std::exception_ptr error;
};

}  // namespace ckdist
