// A socket whose bytes are sealed (comm/transports/sealer.h), or are sent as they are if there are no keys.
//
// One thread may write while another one reads. A socket can outlive its connection (`outlive`): it keeps the records
// that the peer's kernel has not acknowledged. Without keys, a record has the bytes alone, and the peer sees no
// records. If the connection breaks, reads and writes move nothing until another connection takes its place. It
// continues the same stream of bytes, so a stranger cannot add to a sealed one.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/transports/broken_sockets.h"
#include "comm/transports/sealer.h"

namespace ckdist {

class SealedSocket {
 public:
  static constexpr const char* kBroken =
      "sent bytes that are not sealed with the keys of this job: a machine between the hosts changes, repeats or drops "
      "traffic";

  // Takes ownership of `fd`; -1: there is none. keys: of a Sealer, or null.
  explicit SealedSocket(int fd);
  SealedSocket(int fd, const uint8_t* keys);
  static std::deque<SealedSocket> all(const int32_t* fds, int count);
  // keys: of all sockets, one after another, or null.
  static void seal(std::deque<SealedSocket>& sockets, const uint8_t* keys);
  SealedSocket(const SealedSocket&) = delete;
  ~SealedSocket();

  int fd() const { return fd_; }
  // Takes bytes without waiting. Returns their number, 0 if there is no room.
  int64_t write(const void* data, int64_t bytes);
  bool flush();  // sends all bytes that write() has taken; false: not all of it yet
  // As recv() without waiting. EBADMSG: the bytes were not sealed by the peer.
  ssize_t read(void* data, int64_t bytes);
  bool has_data() const { return has_data_.load(std::memory_order_relaxed); }  // that was received already

  // From now on, broken connections are reported to `broken` as `number`.
  void outlive(std::shared_ptr<BrokenSockets> broken, int number);
  bool waits() const { return state_.load(std::memory_order_relaxed) == State::waits; }  // for another connection
  // Returns false while the peer's kernel may lack a record, if another connection could still carry it. Reports a
  // broken connection, since possibly no thread reads from it. Any thread may ask.
  bool has_settled();
  // As if the connection had broken. error: of errno, if no other one is to replace it. Any thread may call it.
  void break_off(int error = 0);
  bool changed() { return changed_.load(std::memory_order_relaxed) && changed_.exchange(false); }  // it waited before
  // Any thread may call these. pause() ends the use of the connection, and reads all that has arrived.
  struct Pause {
    uint64_t received, attempt;  // bytes in all; number of the call
  };
  Pause pause();
  // Takes ownership of `fd`, and sends all bytes from position `received` on, which the peer has not. First it sends a
  // byte that shows the peer that this end reads. mark: the peer's byte is still to come. Until then, nothing counts as
  // acknowledged. Fails if pause() was called again, or if bytes are lost.
  void resume(int fd, uint64_t received, uint64_t attempt, bool mark);
  // Sends all that was written, for some seconds at most: the writer may have nothing else to send for long.
  void send_again(uint64_t attempt);
  void give_up(int error);  // of errno, for reads; 0: they find the end

 private:
  enum class State { open, waits, given_up };
  struct Record {
    std::vector<uint8_t> memory;
    size_t bytes = 0;
  };
  bool is_direct() const { return !sealer_ && !broken_; }  // it has no records
  int64_t write_plain(const uint8_t* data, int64_t bytes);
  bool push();
  void add_record(const uint8_t* data, int64_t bytes);
  void forget();
  int64_t whole_record() const;  // its bytes with head and tag; 0: more must come; -1: it is none
  ssize_t receive(void* data = nullptr, size_t bytes = 0);
  ssize_t receive_into(size_t room);
  ssize_t receive_at(void* data, size_t bytes);
  ssize_t take_mark();
  void note_break();
  ssize_t read_sealed(void* data, int64_t bytes);
  ssize_t read_plain(void* data, int64_t bytes);
  void note_data() {
    const bool is_whole = sealer_ ? whole_record() > 0 : end_ > begin_;
    has_data_.store(opened_ < plain_.size() || is_whole, std::memory_order_relaxed);
  }

  int fd_;
  std::mutex mutex_;  // of a socket with records
  std::unique_ptr<Sealer> sealer_;
  std::vector<uint8_t> staged_;  // data that waits for a record
  // Records that are not sent, or not acknowledged. Positions count the bytes of all records so far.
  std::deque<Record> records_;
  std::vector<Record> spare_;
  uint64_t first_ = 0, next_ = 0, end_of_records_ = 0;  // of the first record; of the next byte to send; the end
  size_t at_ = 0, offset_ = 0;                          // of next_: record, and byte in it
  std::vector<uint8_t> in_;                             // received bytes, from begin_ to end_
  size_t begin_ = 0, end_ = 0;
  uint64_t received_ = 0;       // in all
  std::vector<uint8_t> plain_;  // data of a record that was read in part
  size_t opened_ = 0;
  std::atomic<State> state_{State::open};
  std::atomic<bool> changed_{false}, has_data_{false};
  std::shared_ptr<BrokenSockets> broken_;
  bool marks_ = false;  // the peer's first byte is still to come
  int number_ = 0, error_ = 0;
  uint64_t attempt_ = 0;
};

}  // namespace ckdist
