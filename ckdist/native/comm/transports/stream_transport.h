// A Transport over byte streams: frames, matching by tag, windows and goodbyes, for whatever can write and read bytes
// in order.
//
// Between two ranks run one or more streams ("lanes"). A frame's header says what follows and how much. It is checked
// by the table of kinds (stream_frames.h), then against what this rank posted or exposed, before a byte of the data is
// stored. Nothing is read any more from a peer that broke a rule. Long messages are split over all lanes: the part on
// lane 0 announces the message, and the others wait until it did. Where the peer reads this rank's memory itself, a
// long message is announced alone: the receiver copies it, and says so. A rank that gives up says why to the others
// before it goes. What messages need while they are under way comes from a pool that keeps its memory.
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

  void abandon(const char* reason) override;  // as far as that works without waiting

 protected:
  // Both return how many bytes went through, 0 when none can now; when the stream is gone they say so by ended().
  virtual int64_t write(int peer, int lane, const void* data, int64_t bytes) = 0;
  virtual int64_t read(int peer, int lane, void* data, int64_t bytes) = 0;
  virtual void look() {}  // before the streams are read: which have something?
  // Where `data` lies for peers that read this rank's memory in place, or -1; and what peer has there, null where that
  // cannot be.
  virtual int64_t placed(const void*, int64_t) const { return -1; }
  virtual const uint8_t* in_place(int, int64_t, int64_t) const { return nullptr; }
  virtual int name_of(int peer) const { return peer; }  // the job's number of a rank
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
    std::string kept;  // data of our own
  };
  struct Message {  // matched or not: where the parts go
    explicit Message(std::pmr::memory_resource* pool) : kept(pool) {}
    uint8_t* data = nullptr;  // null until a receive is posted for it
    int64_t bytes = 0;
    int parts = 1;
    uint32_t arrived = 0;  // parts, a bit each
    uint32_t request = 0, mark = 0;
    int tag = 0;
    std::pmr::vector<KeptBytes> kept;  // by part, of a message that nobody was waiting for
    const uint8_t* place = nullptr;    // of data that its sender keeps until it is copied
    uint64_t sequence = 0;
    bool complete() const { return arrived == (1u << parts) - 1; }
    int64_t held() const;  // bytes that it counts for while nobody receives it
  };
  struct Stream {
    explicit Stream(std::pmr::memory_resource* pool) : out(pool) {}
    std::pmr::deque<Outgoing> out;
    FrameHeader header{};
    int64_t got = 0;  // of the header, then of the data
    bool in_data = false, ended = false;
    uint8_t* to = nullptr;
    int64_t room = 0;                  // bytes of the data that fit at `to`
    std::shared_ptr<Message> message;  // that the data belongs to
    std::string goodbye;               // as it arrives: several peers may give up at once, each in pieces
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
    std::pmr::map<uint64_t, std::shared_ptr<Message>> arriving;  // in several parts, by sequence
    std::pmr::deque<std::shared_ptr<Message>> unexpected;
    std::pmr::deque<Posted> posted;
    std::pmr::map<uint64_t, Posted> gets;
    std::pmr::map<uint64_t, uint32_t> lent;  // placed messages that it has not taken: sequence, request
    std::string goodbye, end;                // what it said last; how its streams ended
    int lanes_ended = 0;
    int answers = 0;       // to its gets, not sent yet
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
  void check_match(int peer, const Message& message, int64_t bytes, uint32_t mark);  // of a receive
  void hold(int peer, const std::shared_ptr<Message>& message);                      // until somebody receives it
  static void deliver(const Message& message);                                       // of what was kept
  void take(int peer, const Message& message, void* to);                             // of a placed one
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
  bool awaited(int peer) const;  // is anything under way with it?

  std::shared_ptr<Message> new_message(const FrameHeader& h);

  std::pmr::unsynchronized_pool_resource pool_;
  std::vector<Stream> streams_;
  std::vector<Peer> peers_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> idle_operations_;
  std::map<int, Window> windows_;
  uint64_t get_count_ = 0;
  int64_t unexpected_bytes_ = 0;
  std::string gave_up_;  // why, once this rank did
};

}  // namespace ckdist
