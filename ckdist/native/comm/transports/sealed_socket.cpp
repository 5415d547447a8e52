#include "comm/transports/sealed_socket.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ckdist {

namespace {
constexpr int64_t kLeastDirect = 4096;  // bytes that are not copied before they are sent
constexpr size_t kLeastIn = 4096, kMostIn = 2 * (Sealer::kMost + Sealer::kExtra);
// TCP doubles its time between retransmissions, so a link of 5 s without traffic would carry data again after 6.2 s.
constexpr int kRtoMaxMs = 44;                        // TCP_RTO_MAX_MS, from Linux 6.15 on; older kernels refuse it
constexpr int kMostBetweenRetransmissionsMs = 1000;  // the least that the kernel takes
}  // namespace

SealedSocket::SealedSocket(int fd, const uint8_t* keys) : fd_(fd) {
  if (fd >= 0)
    setsockopt(fd, IPPROTO_TCP, kRtoMaxMs, &kMostBetweenRetransmissionsMs, sizeof kMostBetweenRetransmissionsMs);
  if (fd < 0 || !keys) return;
  try {
    sealer_ = std::make_unique<Sealer>(keys);
  } catch (...) {
    close(fd);
    throw;
  }
}

std::vector<SealedSocket> SealedSocket::all(const int32_t* fds, int count, const uint8_t* keys) {
  std::vector<SealedSocket> sockets;
  sockets.reserve(size_t(count));
  for (int i = 0; i < count; i++) sockets.emplace_back(fds[i], keys ? keys + 2 * Sealer::kKeyBytes * i : nullptr);
  return sockets;
}

SealedSocket::SealedSocket(SealedSocket&& other) noexcept
    : fd_(other.fd_),
      sealer_(std::move(other.sealer_)),
      staged_(std::move(other.staged_)),
      record_(std::move(other.record_)),
      sent_(other.sent_),
      in_(std::move(other.in_)),
      begin_(other.begin_),
      end_(other.end_),
      plain_(std::move(other.plain_)),
      opened_(other.opened_) {
  other.fd_ = -1;
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
  if (!sealer_) return write_plain(static_cast<const uint8_t*>(data), bytes);
  const auto* from = static_cast<const uint8_t*>(data);
  int64_t taken = 0;
  while (taken < bytes && push()) {
    const int64_t n = std::min(bytes - taken, Sealer::kMost - int64_t(staged_.size()));
    if (n == Sealer::kMost) {
      seal(from + taken, n);
    } else {
      staged_.insert(staged_.end(), from + taken, from + taken + n);
      if (int64_t(staged_.size()) == Sealer::kMost) seal(staged_.data(), Sealer::kMost), staged_.clear();
    }
    taken += n;
  }
  return taken;
}

bool SealedSocket::flush() {
  if (!sealer_) {
    while (!staged_.empty()) {
      const ssize_t n = send(fd_, staged_.data(), staged_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return false;
      staged_.erase(staged_.begin(), staged_.begin() + n);
    }
    return true;
  }
  if (!push()) return false;
  if (staged_.empty()) return true;
  seal(staged_.data(), int64_t(staged_.size()));
  staged_.clear();
  return push();
}

void SealedSocket::seal(const uint8_t* data, int64_t bytes) {
  record_.resize(size_t(bytes + Sealer::kExtra));
  sealer_->seal(data, bytes, record_.data());
  sent_ = 0;
}

bool SealedSocket::push() {
  while (sent_ < record_.size()) {
    const ssize_t n = send(fd_, record_.data() + sent_, record_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0) return false;  // the reader notices a broken connection
    sent_ += size_t(n);
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

ssize_t SealedSocket::receive() {
  std::copy(in_.begin() + ptrdiff_t(begin_), in_.begin() + ptrdiff_t(end_), in_.begin());
  end_ -= begin_, begin_ = 0;
  if (in_.size() - end_ < kLeastIn) in_.resize(std::min(kMostIn, std::max(2 * in_.size(), kLeastIn)));
  const ssize_t n = recv(fd_, in_.data() + end_, in_.size() - end_, MSG_DONTWAIT);
  if (n > 0) end_ += size_t(n);
  return n;
}

ssize_t SealedSocket::read(void* data, int64_t bytes) {
  if (!sealer_) return recv(fd_, data, size_t(bytes), MSG_DONTWAIT);
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
