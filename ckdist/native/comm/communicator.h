// All that meets other ranks, in serving and in training: the operations of MPI and NCCL, blocking and not, over any
// transport.
//
// One host: shared memory. Several hosts: a transport between them, and shared memory inside each. Or the transport
// alone. All give the same bits (comm/algorithms/order.h). Non-blocking collectives run one after the other, in the
// order in which they were begun, on a thread of the communicator; a blocking one waits for them. Messages and windows
// are independent of both. A replay uses a view without allocations (comm/step_communicator.h).
//
// After the first failure a communicator tells its peers, and gives the same error to every later call.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
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
  class Operation;  // under way: test it, wait for it

  struct Parts {
    int rank = 0;
    std::vector<int> host_of;            // by rank
    std::shared_ptr<HostMemory> memory;  // null: nothing is shared, the transport alone
    std::vector<int> arenas;             // of this host's ranks, in rank order
    std::shared_ptr<HostMemory>
        own_memory;  // without memory: an arena of this rank alone, for a transport that must know memory; or null
    std::shared_ptr<ShmRendezvous> rendezvous;  // of this host's ranks; with memory
    std::shared_ptr<Transport> transport;       // null: one host
    int context = 0;
    std::vector<int> transport_ranks;           // by rank
    std::vector<int> names;                     // the job's numbers, by rank; with a detector
    std::shared_ptr<FailureDetector> detector;  // null: this is the job's first communicator, which makes it
    Thresholds thresholds;
    int spins = 0;
    double timeout_s = 30;
  };
  explicit Communicator(Parts parts);
  ~Communicator();

  const int rank, size;
  // "shared memory", "tcp", "shared memory and tcp".
  const std::string& transport() const { return transport_; }

  // The collectives, as comm/algorithms/collectives.h has them: within `body`, on the calling thread.
  void run(const std::function<void(Collectives&)>& body);
  std::shared_ptr<Operation> begin(std::function<void(Collectives&)> body);

  // tag: 0 to 1023. Data sent stays as it is, and data received is not looked at, until the operation is complete.
  std::shared_ptr<Operation> isend(int peer, int tag, const void* data, int64_t bytes);
  std::shared_ptr<Operation> irecv(int peer, int tag, void* data, int64_t bytes);

  // Windows are numbered from 0 to 1023; expose is a collective call.
  void expose(int window, void* base, int64_t bytes);
  std::shared_ptr<Operation> iput(int peer, int window, int64_t offset, const void* data, int64_t bytes);
  std::shared_ptr<Operation> iget(int peer, int window, int64_t offset, void* data, int64_t bytes);
  std::shared_ptr<Operation> inotify(int peer, int window, int slot);
  void await_notified(int window, int slot, uint64_t count);  // until this rank's counter has reached it

  // Ranks of one color make a communicator, ordered by key and then by rank; null for a negative color. A collective
  // call.
  std::unique_ptr<Communicator> split(int color, int key);

  // What a replay uses of this communicator, which must outlive it. A collective call.
  std::unique_ptr<StepCommunicator> steps(const StepSizes& sizes);

  void* allocate(
      int64_t bytes);  // in this rank's arena, where peers or the transport reach it in place; null where there is none
  void release(void* data);
  void abandon(const char* reason);
  void check_peers();  // throws when a rank of the job is lost; between calls, for who waits for something else
  void leave();        // nothing is called any more: the peers are told, and miss this rank no longer
  double round_trip(int calls);  // seconds of a cache line's way between the host's first two ranks and back

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
  };  // of one rank's window in its arena; offset -1: elsewhere
  uint8_t* in_reach(int peer, int window, int64_t offset, int64_t bytes);  // null: by messages

  Parts parts_;
  Order order_;
  std::shared_ptr<Channel> channel_;
  std::string transport_;
  std::unique_ptr<Collectives> collectives_;
  std::mutex running_;  // one collective at a time
  // Looked at without the lock, so that the calls of those who use neither cost nothing.
  std::atomic<bool> failed_{false}, has_worker_{false}, left_{false};

  std::mutex mutex_;  // of all below
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
  std::function<void(Collectives&)> body;  // a collective; else a message
  Channel::Pending pending{0, 0};
  bool done = false;
  std::string error;
};

}  // namespace ckdist
