// Transport over MPI's point-to-point calls, from the launcher's MPI implementation.
//
// The library is not linked: the caller passes the addresses of the functions and the values of two handles. Handles
// are ints in some implementations and pointers in others; both are passed in one register.
//
// Windows also use messages. The target serves them while it makes progress, because MPI implementations differ too
// much in their guarantees for one-sided calls. A message of a collective begins with a head that names its call and
// its length.
#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "comm/transports/transport.h"

namespace ckdist {

struct MpiCalls {
  int (*isend)(const void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*irecv)(void* data, int count, void* datatype, int peer, int tag, void* comm, void* request);
  int (*test)(void* request, int* flag, void* status);
  int (*iprobe)(int peer, int tag, void* comm, int* flag, void* status);
  int (*get_count)(const void* status, void* datatype, int* count);
  void* byte;  // MPI_BYTE
  void* comm;  // a communicator only for this transport
};

class MpiTransport : public Transport {
 public:
  MpiTransport(const MpiCalls& calls, int rank, int size, double timeout_s)
      : Transport(rank, size, timeout_s), calls_(calls), heartbeats_(size) {
    for (int i = 0; i < size; i++) serving_.emplace_back(&pool_);
  }

  Request isend(int peer, int tag, const void* data, int64_t bytes) override;
  Request irecv(int peer, int tag, void* data, int64_t bytes) override;
  void expose(int window, void* base, int64_t bytes) override;
  Request iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) override;
  Request iget(int peer, int window, int64_t offset, void* data, int64_t bytes) override;
  Request inotify(int peer, int window, int slot) override;
  uint64_t notified(int window, int slot) override;
  bool test(Request request) override;
  void idle(int64_t ns) override;
  bool has_heartbeats() const override { return true; }
  void send_heartbeat(int peer, const void* data, int64_t bytes) override;
  int64_t receive_heartbeat(int peer, void* data, int64_t bytes) override;
  const char* name() const override { return "mpi"; }

 private:
  enum Kind : int64_t { kPut = 1, kGet, kNotify };
  struct Ask {
    int64_t kind, window, offset, bytes;
  };
  static constexpr int64_t kWithHead = 4080;  // bytes of a message that are copied and sent with its head
  struct Head {
    uint32_t mark, pad;
    int64_t bytes;
    uint8_t data[kWithHead];
    // For a receive: the expected content of the head, and the destination of the data.
    uint32_t wanted_mark;
    int64_t wanted_bytes;
    uint8_t* to;
  };
  static constexpr int64_t kHeadBytes = offsetof(Head, data);
  struct Part {
    alignas(16) uint8_t handle[16];
    int peer;
    bool done;
    bool incoming;
    int bytes, tag;
    const void* data;      // to send
    Head* head = nullptr;  // to receive
  };
  // Messages of one peer with one tag. MPI gets only a few parts at a time, or heartbeats would wait behind all of
  // them.
  struct Queue {
    explicit Queue(std::pmr::memory_resource* pool) : waiting(pool), under_way(pool) {}
    std::pmr::deque<Part*> waiting, under_way;
  };
  struct Operation {
    explicit Operation(std::pmr::memory_resource* pool) : parts(pool) {}
    Operation(Operation&&) = default;  // a copy would not use the pool
    std::pmr::deque<Part> parts;
    Ask ask;  // of a one-sided operation; sent from this memory
    std::optional<Head> head;
  };
  struct Window {
    uint8_t* base;
    int64_t bytes;
    std::map<int, uint64_t> notified;
  };
  // Service of this rank for one peer: one operation at a time, so that a notification follows the puts before it.
  struct Served {
    explicit Served(std::pmr::memory_resource* pool) : operation(pool) {}
    int stage = 0;  // 0: none, 1: the request is arriving, 2: its data is in flight
    Ask ask;
    Operation operation;
  };

  void send(Operation& operation, int peer, int tag, const void* data, int64_t bytes);
  void receive(Operation& operation, int peer, int tag, void* data, int64_t bytes);
  void post(Part& part);
  bool done(Part& part);
  void take_head(int peer, const Head& head, int came);
  bool done(Operation& operation);
  void pump(Queue& queue);
  Request ask(int peer, const Ask& ask, Operation** out);
  Window& window_of(int peer, const Ask& ask);
  void serve();

  MpiCalls calls_;
  std::pmr::unsynchronized_pool_resource pool_{{0, 2 * sizeof(Operation)}};  // keeps its memory: steps allocate nothing
  std::pmr::map<Request, Operation> operations_{&pool_};
  Request last_ = 0;
  std::pmr::map<std::pair<int, int>, Queue> queues_{&pool_};  // by peer and tag
  std::map<int, Window> windows_;
  std::vector<Served> serving_;
  struct Heartbeat {
    Part part{};
    uint8_t data[512];
  };
  std::vector<Heartbeat> heartbeats_;  // in flight, by rank
};

}  // namespace ckdist
