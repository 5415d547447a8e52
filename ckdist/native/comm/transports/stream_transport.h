// A Transport over byte streams: frames, matching by tag, windows and goodbyes, for any stream that delivers bytes in
// order.
//
// A frame's header has the kind and the size of its data. It is checked against the table of kinds (stream_frames.h),
// then against this rank's posted receives and exposed windows, before any data is stored. After a peer has broken a
// rule, nothing more is read from it.
//
// If the peer can read this rank's memory, a long message is only announced: the receiver copies it and acknowledges. A
// rank that fails sends its reason to the others before it exits. Buffers of messages in flight come from a pool that
// keeps its memory.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include "comm/transports/kept_bytes.h"
#include "comm/transports/stream_frames.h"
#include "comm/transports/transport.h"

namespace ckdist {

class StreamTransport : public Transport {
 public:
  StreamTransport(int rank, int size, double timeout_s);

  Request isend(int peer, int tag, const void* data, int64_t bytes) override;
  Request irecv(int peer, int tag, void* data, int64_t bytes) override;
  void expose(int window, void* base, int64_t bytes) override;
  Request iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) override;
  Request iget(int peer, int window, int64_t offset, void* data, int64_t bytes) override;
  Request inotify(int peer, int window, int slot) override;
  uint64_t notified(int window, int slot) override;
  bool test(Request request) override;

  void abandon(const char* reason) override;  // best effort, without waiting

 protected:
  // Both return the number of bytes moved, 0 if none can be moved now. If the stream has ended, they call ended().
  virtual int64_t write(int peer, const void* data, int64_t bytes) = 0;
  virtual int64_t read(int peer, void* data, int64_t bytes) = 0;
  virtual bool flush(int) { return true; }  // sends all bytes that write() has taken; false: not all of it yet
  virtual void look() {}                    // called before the streams are read, to find those with data
  // placed: the position of `data` for peers that read this rank's memory in place, or -1. in_place: the peer's memory
  // at such a position, or null if this is not possible.
  virtual int64_t placed(const void*, int64_t) const { return -1; }
  virtual const uint8_t* in_place(int, int64_t, int64_t) const { return nullptr; }
  virtual int name_of(int peer) const { return peer; }  // a rank's number in the job
  void progress();
  bool anything_to_write(int peer) const { return !peers_[peer].out.empty(); }
  void ended(int peer, const char* how);
  [[noreturn]] void lost(int peer, const char* how) const;

 private:
  struct Outgoing {
    FrameHeader header;
    int64_t sent = 0;  // of header and data together
    const uint8_t* data;
    uint32_t request;  // index + 1, or 0
    std::string kept;  // data owned by the frame
  };
  struct Message {
    explicit Message(std::pmr::memory_resource* pool) : kept(pool) {}
    uint8_t* data = nullptr;  // null until a receive is posted
    int64_t bytes = 0;
    bool arrived = false;
    uint32_t request = 0, mark = 0;
    int tag = 0;
    KeptBytes kept;                  // the data that arrived before a receive was posted
    const uint8_t* place = nullptr;  // data that its sender keeps until it is copied
    uint64_t sequence = 0;
    int64_t held() const;  // bytes that count towards the limit until it is received
  };
  struct Posted {
    int tag;
    uint8_t* data;
    int64_t bytes;
    uint32_t request, mark;
  };
  struct Peer {
    explicit Peer(std::pmr::memory_resource* pool)
        : out(pool), unexpected(pool), posted(pool), gets(pool), lent(pool) {}
    Peer(Peer&&) = default;  // a copy would not use the pool
    std::pmr::deque<Outgoing> out;
    // The frame that is being read.
    FrameHeader header{};
    int64_t got = 0;  // bytes of the header, then of the data
    bool in_data = false;
    uint8_t* to = nullptr;
    int64_t room = 0;                  // bytes of the data that fit at `to`
    std::shared_ptr<Message> message;  // owner of the data
    std::string reason;                // of a goodbye; several peers may fail at once, each in pieces

    uint64_t sent = 0, announced = 0;
    std::pmr::deque<std::shared_ptr<Message>> unexpected;
    std::pmr::deque<Posted> posted;
    std::pmr::map<uint64_t, Posted> gets;
    std::pmr::map<uint64_t, uint32_t> lent;  // placed messages that the peer has not copied: sequence, request
    std::string goodbye, end;                // its last message; how its stream ended
    bool ended = false;
    int answers = 0;       // answers to its gets that are not sent yet
    bool refused = false;  // it broke a rule: nothing more is read
  };
  struct Operation {
    uint32_t generation = 1;
    bool done = false;
  };
  struct Window {
    uint8_t* base = nullptr;
    int64_t bytes = 0;
    std::map<int, uint64_t> notified;
  };

  Request begin();
  void finish(uint32_t request);  // the lower half of a Request; 0: none
  void push(int peer, const FrameHeader& header, const void* data, uint32_t request, std::string kept = {});
  void check_match(int peer, const Message& message, int64_t bytes, uint32_t mark);  // for a receive
  void hold(int peer, const std::shared_ptr<Message>& message);                      // until it is received
  void deliver(const Message& message);
  void take(int peer, const Message& message);  // of a placed message
  void drain(int peer);
  bool fill(int peer);
  void open_frame(int peer);
  void open_taken(int peer, const FrameHeader& h);
  void open_got(int peer, const FrameHeader& h);
  void open_message(int peer, const FrameHeader& h);
  static void place_data(Peer& from);
  Window& window_of(int peer, const FrameHeader& h);
  void close_frame(int peer);
  void close_message(Peer& from);
  [[noreturn]] __attribute__((format(printf, 3, 4))) void cut_off(int peer, const char* format, ...);
  [[noreturn]] void refuse(int peer, const FrameHeader& h, const char* rule);
  void check_peer(int peer) const;
  bool awaited(int peer) const;  // true if any operation waits for it

  std::shared_ptr<Message> new_message(const FrameHeader& h);

  std::pmr::unsynchronized_pool_resource pool_;
  std::vector<Peer> peers_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> idle_operations_;
  std::map<int, Window> windows_;
  uint64_t get_count_ = 0;
  int64_t unexpected_bytes_ = 0;
  std::string gave_up_;  // the reason, once this rank has failed
};

}  // namespace ckdist
