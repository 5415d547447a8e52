#include "comm/transports/sealed_socket.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kLeastDirect = 4096;  // bytes that are not copied before they are sent
constexpr size_t kLeastIn = 4096, kMostIn = 2 * (Sealer::kMost + Sealer::kExtra);
// TCP doubles its time between retransmissions, so a link of 5 s without traffic would carry data again after 6.2 s.
constexpr int kRtoMaxMs = 44;                        // TCP_RTO_MAX_MS, from Linux 6.15 on; older kernels refuse it
constexpr int kMostBetweenRetransmissionsMs = 1000;  // the least that the kernel takes
constexpr uint64_t kLeastKept = 64 << 10;            // bytes before the kernel is asked which are acknowledged
constexpr std::chrono::seconds kMostSendingAgain{10};
constexpr uint8_t kClosed = 7;              // TCP_CLOSE of the kernel
constexpr size_t kMostDrained = 256 << 20;  // far more than the kernel holds

void set_retransmission(int fd) {
  setsockopt(fd, IPPROTO_TCP, kRtoMaxMs, &kMostBetweenRetransmissionsMs, sizeof kMostBetweenRetransmissionsMs);
}
}  // namespace

SealedSocket::SealedSocket(int fd) : fd_(fd) {
  if (fd >= 0) set_retransmission(fd);
}

SealedSocket::SealedSocket(int fd, const uint8_t* keys) : SealedSocket(fd) {
  if (fd >= 0 && keys) sealer_ = std::make_unique<Sealer>(keys);
}

std::deque<SealedSocket> SealedSocket::all(const int32_t* fds, int count) {
  return std::deque<SealedSocket>(fds, fds + count);
}

void SealedSocket::seal(std::deque<SealedSocket>& sockets, const uint8_t* keys) {
  if (!keys) return;
  for (SealedSocket& socket : sockets) {
    if (socket.fd_ >= 0) socket.sealer_ = std::make_unique<Sealer>(keys);
    keys += 2 * Sealer::kKeyBytes;
  }
}

SealedSocket::~SealedSocket() {
  if (fd_ >= 0) close(fd_);
}

// Bytes without keys: small ones wait for flush(), so that a header and its data are one packet.
int64_t SealedSocket::write_plain(const uint8_t* data, int64_t bytes) {
  if (int64_t(staged_.size()) + bytes <= kLeastDirect) {
    staged_.insert(staged_.end(), data, data + bytes);
    return bytes;
  }
  iovec parts[2] = {{staged_.data(), staged_.size()}, {const_cast<uint8_t*>(data), size_t(bytes)}};
  msghdr message{};
  message.msg_iov = parts, message.msg_iovlen = 2;
  const ssize_t n = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  const size_t from_staged = std::min(staged_.size(), size_t(std::max<ssize_t>(0, n)));
  staged_.erase(staged_.begin(), staged_.begin() + ptrdiff_t(from_staged));
  return std::max<ssize_t>(0, n) - int64_t(from_staged);
}

int64_t SealedSocket::write(const void* data, int64_t bytes) {
  if (is_direct()) return write_plain(static_cast<const uint8_t*>(data), bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* from = static_cast<const uint8_t*>(data);
  int64_t taken = 0;
  while (taken < bytes && push()) {
    const int64_t n = std::min(bytes - taken, Sealer::kMost - int64_t(staged_.size()));
    if (n == Sealer::kMost) {
      add_record(from + taken, n);
    } else {
      staged_.insert(staged_.end(), from + taken, from + taken + n);
      if (int64_t(staged_.size()) == Sealer::kMost) add_record(staged_.data(), Sealer::kMost), staged_.clear();
    }
    taken += n;
  }
  return taken;
}

bool SealedSocket::flush() {
  if (is_direct()) {
    while (!staged_.empty()) {
      const ssize_t n = send(fd_, staged_.data(), staged_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return false;
      staged_.erase(staged_.begin(), staged_.begin() + n);
    }
    return true;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!push()) return false;
  if (staged_.empty()) return true;
  add_record(staged_.data(), int64_t(staged_.size()));
  staged_.clear();
  return push();
}

// Drops the records that the peer's kernel has acknowledged: its reader finds them even after a reset.
void SealedSocket::forget() {
  uint64_t acknowledged = next_;
  if (broken_) {
    int waiting;  // bytes that were handed to the kernel and are not acknowledged
    if (marks_ || end_of_records_ - first_ < kLeastKept || ioctl(fd_, TIOCOUTQ, &waiting)) return;
    acknowledged -= std::min(next_, uint64_t(std::max(0, waiting)));
  }
  while (at_ > 0 && first_ + records_.front().bytes <= acknowledged) {
    first_ += records_.front().bytes;
    spare_.push_back(std::move(records_.front()));
    records_.pop_front();
    at_--;
  }
}

void SealedSocket::add_record(const uint8_t* data, int64_t bytes) {
  forget();
  Record record;
  if (!spare_.empty()) record = std::move(spare_.back()), spare_.pop_back();
  record.bytes = size_t(bytes + (sealer_ ? Sealer::kExtra : 0));
  if (record.memory.size() < record.bytes) record.memory.resize(record.bytes);
  if (sealer_) sealer_->seal(data, bytes, record.memory.data());
  else std::memcpy(record.memory.data(), data, size_t(bytes));
  end_of_records_ += record.bytes;
  records_.push_back(std::move(record));
}

bool SealedSocket::push() {
  if (state_ != State::open) return false;
  while (at_ < records_.size()) {
    const Record& record = records_[at_];
    const ssize_t n = send(fd_, record.memory.data() + offset_, record.bytes - offset_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0) return false;  // the reader notices a broken connection
    next_ += size_t(n), offset_ += size_t(n);
    if (offset_ == record.bytes) at_++, offset_ = 0;
  }
  return true;
}

int64_t SealedSocket::whole_record() const {
  const size_t held = end_ - begin_;
  if (held < size_t(Sealer::kHead)) return 0;
  const int64_t bytes = Sealer::data_bytes(in_.data() + begin_);
  if (bytes < 0) return -1;
  return held >= size_t(bytes + Sealer::kExtra) ? bytes + Sealer::kExtra : 0;
}

// Reads the peer's first byte. Returns as recv().
ssize_t SealedSocket::take_mark() {
  uint8_t mark;
  const ssize_t n = marks_ ? recv(fd_, &mark, 1, MSG_DONTWAIT) : 1;
  if (n > 0) marks_ = false;
  return n;
}

void SealedSocket::note_break() {
  state_ = State::waits;
  broken_->add(number_);
}

void SealedSocket::break_off(int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_ || state_ != State::open) return;
  if (error) state_ = State::given_up, error_ = error;
  else note_break();
  changed_ = true;  // the reader looks at it
}

bool SealedSocket::has_settled() {
  if (!broken_) return true;
  const bool is_sent = flush();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::open) return state_ == State::given_up;
  const bool is_read = take_mark() > 0;
  int waiting = 0;  // bytes that were handed to the kernel and are not acknowledged
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (is_sent && is_read && !ioctl(fd_, TIOCOUTQ, &waiting) && waiting == 0) return true;
  if (!getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &bytes) && info.tcpi_state == kClosed) note_break();
  return false;
}

ssize_t SealedSocket::receive_at(void* data, size_t bytes) {
  if (const ssize_t n = take_mark(); n <= 0) return n;
  const ssize_t n = recv(fd_, data, bytes, MSG_DONTWAIT);
  if (n > 0) received_ += size_t(n);
  return n;
}

ssize_t SealedSocket::receive_into(size_t room) {
  if (begin_ > 0) std::copy(in_.begin() + ptrdiff_t(begin_), in_.begin() + ptrdiff_t(end_), in_.begin());
  end_ -= begin_, begin_ = 0;
  if (in_.size() - end_ < kLeastIn) in_.resize(std::min(room, std::max(2 * in_.size(), kLeastIn)));
  const ssize_t n = receive_at(in_.data() + end_, in_.size() - end_);
  if (n > 0) end_ += size_t(n);
  return n;
}

// Returns as recv(). Without `data`, the bytes go to in_.
ssize_t SealedSocket::receive(void* data, size_t bytes) {
  if (state_ == State::open) {
    const ssize_t n = data ? receive_at(data, bytes) : receive_into(kMostIn);
    if (n > 0 || !broken_ || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return n;
    note_break();
  }
  errno = state_ == State::waits ? EAGAIN : error_;
  return errno ? -1 : 0;
}

void SealedSocket::outlive(std::shared_ptr<BrokenSockets> broken, int number) {
  broken_ = std::move(broken), number_ = number;
}

SealedSocket::Pause SealedSocket::pause() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::given_up || !broken_) fail(Status::comm, "this connection was given up");
  state_ = State::waits;
  while (end_ - begin_ < kMostDrained && receive_into(kMostDrained) > 0) {}
  note_data();
  return {received_, ++attempt_};
}

void SealedSocket::resume(int fd, uint64_t received, uint64_t attempt, bool mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // More than next_ has arrived if the old connection went on while an earlier attempt failed.
  const bool late = state_ != State::waits || attempt != attempt_;
  const bool known = received >= first_ && received <= end_of_records_;
  if (!late && known) {
    set_retransmission(fd);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    dup3(fd, fd_, O_CLOEXEC);
    send(fd_, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);  // the reader notices a broken connection
    marks_ = mark;
  }
  close(fd);
  if (late) fail(Status::comm, "a later connection took its place");
  if (!known)
    fail(Status::comm,
         "it has %llu bytes of %llu, of which the first %llu are no longer kept: a machine between the "
         "hosts acknowledged them in its place",
         (unsigned long long)received, (unsigned long long)end_of_records_, (unsigned long long)first_);
  next_ = first_;
  for (at_ = 0; at_ < records_.size() && next_ + records_[at_].bytes <= received; at_++) next_ += records_[at_].bytes;
  offset_ = size_t(received - next_);
  next_ = received;
  state_ = State::open;
  changed_ = true;
}

void SealedSocket::send_again(uint64_t attempt) {
  const auto end = std::chrono::steady_clock::now() + kMostSendingAgain;
  pollfd room{fd_, POLLOUT, 0};
  do {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (attempt != attempt_ || state_ != State::open || push()) return;
    }
    poll(&room, 1, 1);
  } while (std::chrono::steady_clock::now() < end);
}

void SealedSocket::give_up(int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::waits) return;
  error_ = error;
  state_ = State::given_up;
  changed_ = true;
}

ssize_t SealedSocket::read(void* data, int64_t bytes) {
  if (is_direct()) return recv(fd_, data, size_t(bytes), MSG_DONTWAIT);
  const std::lock_guard<std::mutex> lock(mutex_);
  const ssize_t n = sealer_ ? read_sealed(data, bytes) : read_plain(data, bytes);
  const int error = errno;
  note_data();
  errno = error;
  return n;
}

// Bytes without keys. Those that pause() has read come first.
ssize_t SealedSocket::read_plain(void* data, int64_t bytes) {
  if (begin_ == end_) return receive(data, size_t(bytes));
  const size_t n = std::min(size_t(bytes), end_ - begin_);
  std::memcpy(data, in_.data() + begin_, n);
  begin_ += n;
  return ssize_t(n);
}

ssize_t SealedSocket::read_sealed(void* data, int64_t bytes) {
  if (opened_ == plain_.size()) {
    int64_t whole;
    while ((whole = whole_record()) == 0)
      if (const ssize_t n = receive(); n <= 0) return n;
    const int64_t inside = whole - Sealer::kExtra;
    const bool direct = inside <= bytes;
    plain_.resize(direct || whole < 0 ? 0 : size_t(inside)), opened_ = 0;
    if (whole < 0 ||
        !sealer_->unseal(in_.data() + begin_, whole, direct ? static_cast<uint8_t*>(data) : plain_.data())) {
      plain_.clear();
      errno = EBADMSG;
      return -1;
    }
    begin_ += size_t(whole);
    if (direct) return ssize_t(inside);
  }
  const size_t n = std::min(size_t(bytes), plain_.size() - opened_);
  std::memcpy(data, plain_.data() + opened_, n);
  opened_ += n;
  return ssize_t(n);
}

}  // namespace ckdist
