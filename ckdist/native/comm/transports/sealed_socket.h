// A socket whose bytes are sealed (comm/transports/sealer.h), or are sent as they are if there are no keys.
//
// One thread may write while another one reads.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/transports/sealer.h"

namespace ckdist {

class SealedSocket {
 public:
  static constexpr const char* kBroken =
      "sent bytes that are not sealed with the keys of this job: a machine between the hosts changes, repeats or drops "
      "traffic";

  // Takes ownership of `fd`; -1: there is none. keys: of a Sealer, or null.
  explicit SealedSocket(int fd, const uint8_t* keys = nullptr);
  // keys: of all sockets, one after another, or null.
  static std::vector<SealedSocket> all(const int32_t* fds, int count, const uint8_t* keys);
  SealedSocket(SealedSocket&& other) noexcept;
  SealedSocket& operator=(SealedSocket&&) = delete;
  ~SealedSocket();

  int fd() const { return fd_; }
  // Takes bytes without waiting. Returns their number, 0 if there is no room.
  int64_t write(const void* data, int64_t bytes);
  bool flush();  // sends all bytes that write() has taken; false: not all of it yet
  // As recv() without waiting. EBADMSG: the bytes were not sealed by the peer.
  ssize_t read(void* data, int64_t bytes);
  bool has_data() const { return opened_ < plain_.size() || whole_record() > 0; }  // that was received already

 private:
  int64_t write_plain(const uint8_t* data, int64_t bytes);
  bool push();
  void seal(const uint8_t* data, int64_t bytes);
  int64_t whole_record() const;  // its bytes with head and tag; 0: more must come; -1: it is none
  ssize_t receive();

  int fd_;
  std::unique_ptr<Sealer> sealer_;
  std::vector<uint8_t> staged_, record_;  // data that waits for a record; a record that is being sent
  size_t sent_ = 0;                       // of the record
  std::vector<uint8_t> in_;               // received bytes, from begin_ to end_
  size_t begin_ = 0, end_ = 0;
  std::vector<uint8_t> plain_;  // data of a record that was read in part
  size_t opened_ = 0;
};

}  // namespace ckdist
