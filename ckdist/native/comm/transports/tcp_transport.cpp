#include "comm/transports/tcp_transport.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr uint32_t kFreshMs = 3000;  // a heartbeat comes at least every second

constexpr int kVain = 3;                      // retransmissions without an answer: more than a second
constexpr uint64_t kCarriedLarge = 16 << 10;  // acknowledged bytes, among which were packets of full size: each
                                              // connection between hosts carries so many at start

constexpr int kLosesLarge = EMSGSIZE;  // error of a connection that was given up

constexpr uint8_t kEstablished = 1;  // TCP_ESTABLISHED of the kernel

bool info_of(int fd, tcp_info* info) {
  socklen_t bytes = sizeof *info;
  *info = {};
  return fd >= 0 && getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &bytes) == 0;
}

uint64_t in_flight(const tcp_info& info) {
  return info.tcpi_bytes_sent - std::min(info.tcpi_bytes_sent, info.tcpi_bytes_retrans + info.tcpi_bytes_acked);
}

}  // namespace

TcpTransport::TcpTransport(int rank, int size, std::deque<SealedSocket> sockets, double timeout_s)
    : StreamTransport(rank, size, timeout_s),
      sockets_(std::move(sockets)),
      readable_(sockets_.size()),
      watched_(sockets_.size()),
      stalled_ns_(sockets_.size(), -timeout_ns),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) fail(Status::native, "epoll_create1: %s", std::strerror(errno));
  for (int i = 0; i < size; i++) {
    if (i == rank) continue;
    const int fd = sockets_[i].fd(), one = 1;
    // A peer whose host is gone does not answer. The kernel gives up on it as soon as a caller here would.
    const unsigned patience = unsigned(std::min(timeout_s, 2e6) * 1000);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience, sizeof patience);
    watch(i, EPOLL_CTL_ADD, false);
  }
}

TcpTransport::~TcpTransport() {
  broken_->close();
  close(epoll_);
}

void TcpTransport::watch(int peer, int operation, bool for_room) {
  epoll_event event{for_room ? EPOLLIN | EPOLLOUT : EPOLLIN, {}};
  event.data.u32 = uint32_t(peer);
  watched_[peer] = for_room;
  if (epoll_ctl(epoll_, operation, sockets_[peer].fd(), &event) && operation == EPOLL_CTL_ADD && errno != EEXIST)
    fail(Status::config, "socket %d of rank %d cannot be watched: %s", sockets_[peer].fd(), peer, std::strerror(errno));
}

std::shared_ptr<BrokenSockets> TcpTransport::outlive_connections() {
  for (int i = 0; i < 2 * size; i++)
    if (i % size != rank) socket(i).outlive(broken_, i);
  return broken_;
}

SealedSocket& TcpTransport::socket(int number) {
  if (number < 0 || number >= 2 * size || number % size == rank)
    fail(Status::config, "%d is not a connection of rank %d", number, rank);
  return number < size ? sockets_[number] : heartbeat_sockets.at(size_t(number - size));
}

bool TcpTransport::has_settled(int peer) {
  return sockets_[peer].has_settled() && heartbeat_sockets.at(size_t(peer)).has_settled();
}

int64_t TcpTransport::write(int peer, const void* data, int64_t bytes) {
  // An error is not reported here: data that the peer sent before its end must still be read. The reader finds the end,
  // and a goodbye is more precise than a broken pipe.
  return sockets_[peer].write(data, bytes);
}

int64_t TcpTransport::read(int peer, void* data, int64_t bytes) {
  if (sockets_[peer].changed()) {
    watch(peer, EPOLL_CTL_ADD, false);
    readable_[peer] = true;
  }
  if (!readable_[peer] && !sockets_[peer].has_data()) return 0;
  const ssize_t n = sockets_[peer].read(data, bytes);
  if (n > 0) return n;
  readable_[peer] = false;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    // The end of its old connection would wake this rank forever.
    if (sockets_[peer].waits()) watch(peer, EPOLL_CTL_DEL, false);
    return 0;
  }
  if (n < 0 && errno == EBADMSG) {
    ended(peer, SealedSocket::kBroken);
    return 0;
  }
  const bool reset = n == 0 || errno == ECONNRESET;
  // A connection that times out without a route reports that instead (EHOSTUNREACH, ENETUNREACH).
  ended(peer, n < 0 && errno == kLosesLarge
                  ? "does not answer: nothing large is acknowledged while heartbeats pass; check that the MTU is the "
                    "same on both hosts and on all switches between them"
              : reset ? "closed the connection: it ended or died"
                      : "does not answer: its connection timed out");
  return 0;
}

// Fills in the state of the data's connection. Returns true if the heartbeats' connection works.
bool TcpTransport::heartbeats_pass(int peer, tcp_info* data) const {
  tcp_info heartbeats;
  return size_t(peer) < heartbeat_sockets.size() && info_of(heartbeat_sockets[peer].fd(), &heartbeats) &&
         info_of(sockets_[peer].fd(), data) && heartbeats.tcpi_state == kEstablished &&
         heartbeats.tcpi_retransmits == 0 && heartbeats.tcpi_last_ack_recv < kFreshMs;
}

// A firewall that has forgotten a connection drops its packets in silence. If the connection that replaces it carries
// nothing large either, the path loses large packets.
void TcpTransport::mend_stalled(int peer) {
  tcp_info data;
  if (!heartbeats_pass(peer, &data) || data.tcpi_state != kEstablished || data.tcpi_retransmits < kVain ||
      data.tcpi_last_ack_recv < uint64_t(timeout_ns / 4'000'000))
    return;
  const int64_t now = now_ns();
  const bool again = now - std::exchange(stalled_ns_[peer], now) < timeout_ns;
  const bool loses_large = data.tcpi_bytes_acked < kCarriedLarge && in_flight(data) >= data.tcpi_snd_mss;
  sockets_[peer].break_off(again && loses_large ? kLosesLarge : 0);
}

void TcpTransport::idle(int64_t ns) {
  for (int i = 0; i < size; i++) {
    const bool wanted = i != rank && anything_to_write(i);
    if (wanted != watched_[i]) watch(i, EPOLL_CTL_MOD, wanted);
  }
  wait(int(std::max<int64_t>(1, ns / 1'000'000)));
}

void TcpTransport::wait(int milliseconds) {
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, milliseconds);
  for (int i = 0; i < count; i++)
    if (events[i].events & ~uint32_t(EPOLLOUT)) readable_[events[i].data.u32] = true;
}

}  // namespace ckdist
