// The implementation of the Verbs transport: per peer one queue pair, one ring of slots and one queue of waiting work;
// requests; windows.
#pragma once
#include "comm/transports/verbs.h"
#include "comm/transports/verbs_queue_pair.h"

#if CKDIST_HAVE_VERBS
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ckdist {

class VerbsTransport : public Verbs {
 public:
  VerbsTransport(const char* device, int port, int gid_index, int rank, int size, double timeout_s);
  ~VerbsTransport() override;

  void address(uint8_t* out) const override;
  void connect(const uint8_t* all) override;
  bool register_memory(void* base, int64_t bytes) override;
  void forget_memory(void* base) override;
  void abandon(const char* reason) override;

  Request isend(int peer, int tag, const void* data, int64_t bytes) override;
  Request irecv(int peer, int tag, void* data, int64_t bytes) override;
  void expose(int window, void* base, int64_t bytes) override;
  Request iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) override;
  Request iget(int peer, int window, int64_t offset, void* data, int64_t bytes) override;
  Request inotify(int peer, int window, int slot) override;
  uint64_t notified(int window, int slot) override;
  bool test(Request request) override;
  void idle(int64_t ns) override;
  const char* name() const override { return "verbs"; }

 private:
  enum class What : uint8_t { send, receive, put, get, notify };
  struct Operation {
    uint32_t generation = 1;
    bool used = false, done = false;
    bool open = false;  // offered or accepted: the peer may answer it once
    What what = What::send;
    int peer = 0;
    uint8_t* data = nullptr;
    int64_t bytes = 0;
    ibv_mr* region = nullptr;  // registered only for this operation
    uint32_t key = 0;
  };
  // Work that waits for room in the queue, for credits, or for the peer to expose its window. A peer's work is done in
  // order.
  struct Work {
    enum Kind : uint8_t { frame, write, put, get } kind;
    VerbsFrame header{};     // of a frame; for put and get: tag is the window, address the offset
    uint32_t operation = 0;  // index + 1; completed when a frame is posted, or by the completion of other work
    const uint8_t* data = nullptr;
    int64_t bytes = 0, done = 0;
  };
  struct Offer {
    int tag;
    uint32_t mark;
    int64_t bytes;
    uint32_t id;
    bool here;
    std::vector<uint8_t> data;
  };
  struct Posted {
    int tag;
    uint32_t mark, operation;
  };
  struct Piece {
    uint64_t number;
    uint32_t operation, bytes;
  };  // one request of a long message; operation: ends with it, or 0
  struct Exposed {
    uint64_t address = 0;
    int64_t bytes = 0;
    uint32_t key = 0, times = 0;
  };
  struct Window {
    int64_t bytes = 0;
    ibv_mr* region = nullptr;
    uint32_t times = 0;
    std::map<int, uint64_t> notified;
  };
  struct Peer {
    std::unique_ptr<VerbsQueuePair> pair;
    uint8_t* inbox = nullptr;   // (slots, kVerbsSlotBytes): written by the peer
    uint8_t* outbox = nullptr;  // frames on their way to the peer's inbox
    VerbsRemote ring{};
    uint32_t credits = 0, owed = 0;
    uint64_t sent = 0, received = 0;  // number of frames
    std::deque<Work> work;
    std::deque<Piece> under_way;  // requests of data
    std::deque<Posted> posted;
    std::deque<Offer> unexpected;
    std::map<int, Exposed> windows;
    int pending = 0;  // number of operations
    int64_t heard_ns = 0;
    std::string lost;   // why it cannot be reached, or empty
    bool left = false;  // it has finished and needs nothing more from this rank
  };

  static constexpr int kNoKey = -1;
  uint32_t begin(What what, int peer, void* data, int64_t bytes, int access);
  Request access(What what, int peer, int window, int64_t offset, void* data, int64_t bytes);
  void finish(uint32_t operation);
  Request ticket(uint32_t operation) const { return uint64_t(operations_[operation - 1].generation) << 32 | operation; }
  Operation& expect(int peer, uint32_t operation, What what);  // an operation that a peer named
  Peer& reachable(int peer);
  [[noreturn]] void lost(int peer) const;
  void lose(int peer, const std::string& why);

  ibv_mr* registered(const void* base, int64_t bytes) const;

  void enqueue(int peer, Work work);
  bool post(int peer, Work& work);  // false: not possible now
  bool post_frame(Peer& to, VerbsFrame header, const void* data, int64_t bytes, uint32_t keep);
  bool post_data(int peer, Work& work, VerbsRemote at);
  void flush(int peer);
  void accept(int peer, uint32_t operation, uint32_t id);
  void check_match(int peer, int64_t sent, uint32_t sent_mark, int64_t bytes, uint32_t mark) const;

  void return_credits();
  bool progress();  // true if anything completed or arrived
  void gave_up(int peer, const std::string& reason);
  void take_events();
  std::string port_down() const;
  void watch();  // checks events, and whether silent peers still exist
  void ended(int peer, const ibv_wc& entry);
  void arrived(int peer, const ibv_wc& entry);
  void take(int peer, const VerbsFrame& frame, const uint8_t* data);
  void take_message(int peer, const VerbsFrame& frame, const uint8_t* data);
  void take_window(int peer, const VerbsFrame& frame);
  void refuse(int peer, const VerbsFrame& frame, const char* rule);
  void say_last(VerbsKind kind, const char* text, int64_t most_ns);

  std::unique_ptr<uint8_t, void (*)(void*)> rings_;  // every peer's inbox, then every peer's outbox
  VerbsDevice device_;
  const int slots_;
  uint32_t inbox_key_ = 0, outbox_key_ = 0;
  std::vector<ibv_mr*> arenas_;
  std::map<int, Window> windows_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> unused_;
  std::vector<Peer> peers_;
  int waiting_ = 0;   // work in all queues
  int gave_up_ = -1;  // the first peer that reported a failure
  int64_t unexpected_bytes_ = 0, watched_ns_ = 0;
  uint32_t polls_ = 0, idles_ = 0;
  bool connected_ = false;
};

}  // namespace ckdist
#endif
