// A Transport over byte streams: frames, matching by tag, windows and goodbyes, for any stream that delivers bytes in
// order.
//
// Two ranks have one or more streams ("lanes"). A frame's header has the kind and the size of its data. It is checked
// against the table of kinds (stream_frames.h), then against this rank's posted receives and exposed windows, before
// any data is stored. After a peer has broken a rule, nothing more is read from it.
//
// Long messages are split over all lanes. The part on lane 0 announces the message; parts on other lanes wait for it.
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
  StreamTransport(int rank, int size, int lanes, double timeout_s);

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
  virtual int64_t write(int peer, int lane, const void* data, int64_t bytes) = 0;
  virtual int64_t read(int peer, int lane, void* data, int64_t bytes) = 0;
  virtual void look() {}  // called before the streams are read, to find those with data
  // placed: the position of `data` for peers that read this rank's memory in place, or -1. in_place: the peer's memory
  // at such a position, or null if this is not possible.
  virtual int64_t placed(const void*, int64_t) const { return -1; }
  virtual const uint8_t* in_place(int, int64_t, int64_t) const { return nullptr; }
  virtual int name_of(int peer) const { return peer; }  // a rank's number in the job
  void progress();
  bool anything_to_write(int peer, int lane) const { return !streams_[peer * lanes_ + lane].out.empty(); }
  void ended(int peer, int lane, const char* how);
  [[noreturn]] void lost(int peer, const char* how) const;
  const int lanes_;

 private:
  struct Outgoing {
    FrameHeader header;
    int64_t sent = 0;  // of header and data together
    const uint8_t* data;
    uint32_t request;  // index + 1, or 0
    std::string kept;  // data owned by the frame
  };
  struct Message {  // matched or not; destination of its parts
    explicit Message(std::pmr::memory_resource* pool) : kept(pool) {}
    uint8_t* data = nullptr;  // null until a receive is posted
    int64_t bytes = 0;
    int parts = 1;
    uint32_t arrived = 0;  // parts, one bit each
    uint32_t request = 0, mark = 0;
    int tag = 0;
    std::pmr::vector<KeptBytes> kept;  // by part, for a message without a posted receive
    const uint8_t* place = nullptr;    // data that its sender keeps until it is copied
    uint64_t sequence = 0;
    bool complete() const { return arrived == (1u << parts) - 1; }
    int64_t held() const;  // bytes that count towards the limit until it is received
  };
  struct Stream {
    explicit Stream(std::pmr::memory_resource* pool) : out(pool) {}
    std::pmr::deque<Outgoing> out;
    FrameHeader header{};
    int64_t got = 0;  // bytes of the header, then of the data
    bool in_data = false, ended = false;
    uint8_t* to = nullptr;
    int64_t room = 0;                  // bytes of the data that fit at `to`
    std::shared_ptr<Message> message;  // owner of the data
    std::string goodbye;               // received so far: several peers may fail at once, each in pieces
  };
  struct Posted {
    int tag;
    uint8_t* data;
    int64_t bytes;
    uint32_t request, mark;
  };
  struct Peer {
    explicit Peer(std::pmr::memory_resource* pool)
        : arriving(pool), unexpected(pool), posted(pool), gets(pool), lent(pool) {}
    uint64_t sent = 0, announced = 0;
    std::pmr::map<uint64_t, std::shared_ptr<Message>> arriving;  // messages of several parts, by sequence
    std::pmr::deque<std::shared_ptr<Message>> unexpected;
    std::pmr::deque<Posted> posted;
    std::pmr::map<uint64_t, Posted> gets;
    std::pmr::map<uint64_t, uint32_t> lent;  // placed messages that the peer has not copied: sequence, request
    std::string goodbye, end;                // its last message; how its streams ended
    int lanes_ended = 0;
    int answers = 0;       // answers to its gets that are not sent yet
    bool refused = false;  // it broke a rule: nothing more is read
  };
  struct Operation {
    uint32_t generation = 1;
    int left = 0;
    bool used = false;
  };
  struct Window {
    uint8_t* base = nullptr;
    int64_t bytes = 0;
    std::map<int, uint64_t> notified;
  };

  uint32_t begin(int parts);
  void finish(uint32_t request);
  Request ticket(uint32_t request) const;
  void push(int peer, int lane, const FrameHeader& header, const void* data, uint32_t request, std::string kept = {});
  void check_match(int peer, const Message& message, int64_t bytes, uint32_t mark);  // for a receive
  void hold(int peer, const std::shared_ptr<Message>& message);                      // until it is received
  static void deliver(const Message& message);                                       // of kept data
  void take(int peer, const Message& message, void* to);                             // of a placed message
  bool drain(int peer, int lane);
  bool fill(int peer, int lane);
  bool open_frame(int peer, int lane);  // false: its message is not announced yet
  void open_placed(int peer, const FrameHeader& h);
  void open_taken(int peer, const FrameHeader& h);
  void open_got(int peer, Stream& stream);
  void announce(int peer, Stream& stream);
  bool open_part(int peer, int lane, Stream& stream);
  static void place_data(int lane, Stream& stream);
  Window& window_of(int peer, const FrameHeader& h);
  void close_frame(int peer, int lane);
  void close_message(int peer, int lane, Stream& stream);
  [[noreturn]] __attribute__((format(printf, 3, 4))) void cut_off(int peer, const char* format, ...);
  [[noreturn]] void refuse(int peer, const FrameHeader& h, const char* rule);
  void check_peer(int peer) const;
  bool awaited(int peer) const;  // true if any operation waits for it

  std::shared_ptr<Message> new_message(const FrameHeader& h);

  std::pmr::unsynchronized_pool_resource pool_;
  std::vector<Stream> streams_;
  std::vector<Peer> peers_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> idle_operations_;
  std::map<int, Window> windows_;
  uint64_t get_count_ = 0;
  int64_t unexpected_bytes_ = 0;
  std::string gave_up_;  // the reason, once this rank has failed
};

}  // namespace ckdist
