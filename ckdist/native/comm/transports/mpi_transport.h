// Transport over MPI's point-to-point calls, handed over by address as comm/transports/mpi_calls.h explains.
//
// Windows are messages too, served by the target while it makes progress: what implementations promise of MPI's own
// one-sided calls differs too much. A message of a collective begins with a head that says which call it belongs to,
// and how long it is.
#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/transports/mpi_calls.h"
#include "comm/transports/transport.h"

namespace ckdist {

class MpiTransport : public Transport {
 public:
  using Probe = int (*)(int peer, int tag, void* comm, int* flag, void* status);  // MPI_Iprobe
  using GetCount = int (*)(const void* status, void* datatype, int* count);
  MpiTransport(const MpiCalls& calls, Probe probe, GetCount get_count, int rank, int size, double timeout_s)
      : Transport(rank, size, timeout_s),
        calls_(calls),
        probe_(probe),
        get_count_(get_count),
        serving_(size),
        heartbeats_(size) {}

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
  static constexpr int64_t kWithHead = 4080;  // bytes of a message that travel with its head, copied
  struct Head {
    uint32_t mark, pad;
    int64_t bytes;
    uint8_t data[kWithHead];
    // Of a message that is awaited: what the head must say, and where its data goes.
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
    const void* data;      // to be sent
    Head* head = nullptr;  // that arrives
  };
  struct Queue {  // of one peer's messages with one tag: MPI holds a few parts at a time, or heartbeats would wait
                  // behind them all
    std::deque<Part*> waiting, under_way;
  };
  struct Operation {
    std::deque<Part> parts;
    Ask ask;  // of a one-sided operation; sent from here
    std::unique_ptr<Head> head;
  };
  struct Window {
    uint8_t* base;
    int64_t bytes;
    std::map<int, uint64_t> notified;
  };
  struct Served {   // what this rank does for one peer: one thing at a time, so that a notification follows the puts
                    // before it
    int stage = 0;  // 0: nothing, 1: the request is arriving, 2: its data is on the way
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
  Probe probe_;
  GetCount get_count_;
  std::map<Request, Operation> operations_;
  Request last_ = 0;
  std::map<std::pair<int, int>, Queue> queues_;  // by peer and tag
  std::map<int, Window> windows_;
  std::vector<Served> serving_;
  struct Heartbeat {
    Part part{};
    uint8_t data[512];
  };
  std::vector<Heartbeat> heartbeats_;  // on their way, by rank
};

}  // namespace ckdist
