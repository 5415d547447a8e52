#include "comm/failure/failure_detector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/failure/process.h"
#include "core/error.h"

namespace ckdist {

namespace {
constexpr uint32_t kMagic = 0x31706b63;
constexpr int64_t kMostPeriodNs = 1'000'000'000;
constexpr int64_t kLookNs = 100'000'000;  // poll interval if no descriptor signals a change
constexpr int kSettleMs = 1;
constexpr int kPidfdOpen = 434;  // the same number on every architecture
// An outage of 0.8 of the timeout must leave time for a retransmission (sealed_socket.cpp) and for the next heartbeat.
int64_t period_ns(int64_t timeout_ns) { return std::min(kMostPeriodNs, timeout_ns / 32); }
}  // namespace

FailureDetector::FailureDetector(int rank, int size, std::shared_ptr<ShmRendezvous> rendezvous, std::vector<int> local,
                                 std::shared_ptr<Transport> transport, double timeout_s)
    : rank_(rank),
      timeout_ns_(int64_t(timeout_s * 1e9)),
      rendezvous_(std::move(rendezvous)),
      transport_(std::move(transport)),
      peers_(size),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) fail(Status::native, "eventfd: %s", std::strerror(errno));
  for (size_t i = 0; rendezvous_ && i < local.size(); i++) peers_[local[i]].local = int(i);
  for (int r = 0; r < size; r++) {
    peers_[r].heard_ns = now_ns();
    if (r != rank && peers_[r].local < 0 && !transport_->heartbeat_sockets.empty())
      peers_[r].socket = &transport_->heartbeat_sockets[r];
    if (over_transport(r) && !transport_->has_heartbeats())
      peers_[r].gone = true;  // such a transport watches its peers itself
  }
  peers_[rank].gone = true;
  if (size > 1) thread_ = std::thread([this] { run(); });
}

FailureDetector::~FailureDetector() {
  stop();
  for (Peer& p : peers_)
    if (p.process >= 0) close(p.process);
  close(wake_);
}

void FailureDetector::fail_with_reason(const CallName& call) const {
  fail(Status::comm, "%.400s%.60s", reason_.c_str(), call.context().c_str());
}

void FailureDetector::report_lost(int r, const char* what) {
  peers_[r].gone = true;
  if (lost()) return;
  reason_ = (peers_[r].local < 0 && transport_ ? transport_->who(r) : "rank " + std::to_string(r)) + " " + what;
  lost_.store(true, std::memory_order_release);
}

void FailureDetector::leave() {
  if (--users_ > 0) return;
  const bool is_well = tell(kLeft, "");
  is_leaving_ = is_well && !lost();
  stop();
}

void FailureDetector::stop() {
  ending_ = true;
  eventfd_write(wake_, 1);
  if (thread_.joinable()) thread_.join();
}

void FailureDetector::give_up(const char* reason) { tell(kGaveUp, reason); }

// Returns false if this rank has already said that it left or gave up.
bool FailureDetector::tell(Kind kind, const char* text) {
  std::lock_guard<std::mutex> hold(telling_);
  if (gave_up_ && kind != kHeartbeat) return false;
  gave_up_ |= kind != kHeartbeat;
  Frame frame{kMagic,
              uint16_t(kind),
              uint16_t(std::min<size_t>(std::strlen(text), kMaxText)),
              transport_->signs(),
              waits_for_.load(std::memory_order_relaxed),
              0,
              {}};
  std::memcpy(frame.text, text, frame.text_bytes);
  if (rendezvous_) {
    if (kind == kHeartbeat) rendezvous_->heartbeat(frame.moved, frame.waits_for);
    if (kind == kLeft) rendezvous_->leave();
    if (kind == kGaveUp) rendezvous_->abandon(text);
  }
  for (size_t r = 0; r < peers_.size(); r++) {
    const Peer& p = peers_[r];
    // Frames are much smaller than a socket's buffer. If a frame does not fit, the peer has not read for a long time.
    if (p.socket) {
      p.socket->write(&frame, kHead + frame.text_bytes);
      p.socket->flush();
    } else if (over_transport(int(r)) && transport_->has_heartbeats()) {
      Turn turn(*transport_);
      transport_->send_heartbeat(int(r), &frame, kHead + frame.text_bytes);
    }
  }
  return true;
}

void FailureDetector::look_at_local(int r) {
  Peer& p = peers_[r];
  const ShmRendezvous::Life life = rendezvous_->life(p.local);
  if (life.left) {
    p.gone = true;
  } else if (life.abandoned) {
    char text[kMaxText + 40];
    std::snprintf(text, sizeof text, "(pid %d) gave up: %s", life.pid, rendezvous_->reason(p.local).c_str());
    report_lost(r, text);
  } else if (life.pid) {
    if (life.heartbeats != p.heartbeats) p.heard_ns = now_ns();
    p.heartbeats = life.heartbeats;
    p.moved.store(life.moved, std::memory_order_relaxed);
    p.waits_for.store(life.waits_for, std::memory_order_relaxed);
    if (life.pid == getpid()) return;
    pollfd ended{p.process, POLLIN, 0};
    if (p.process < 0) p.process = int(syscall(kPidfdOpen, life.pid, 0));
    // Checks the start time if pidfds are not allowed, or if the pid was reused before the pidfd was opened.
    const bool dead = ended.fd >= 0 ? poll(&ended, 1, 0) > 0 : process_start(life.pid) != life.start;
    if (!dead) return;
    if ((p.gone = rendezvous_->life(p.local).left)) return;
    char text[80];
    std::snprintf(text, sizeof text, "(pid %d) died", life.pid);
    report_lost(r, text);
  }
}

bool FailureDetector::is_sane(const Frame& frame) {
  return frame.magic == kMagic && frame.text_bytes <= kMaxText && frame.kind >= kHeartbeat && frame.kind <= kGaveUp;
}

void FailureDetector::look_at_socket(int r) {
  Peer& p = peers_[r];
  while (!p.gone) {
    const int64_t wanted = p.got < kHead ? kHead : kHead + p.frame.text_bytes;
    const ssize_t n = p.got < wanted ? p.socket->read(reinterpret_cast<uint8_t*>(&p.frame) + p.got, wanted - p.got) : 0;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (n <= 0 && p.got < wanted) {
      report_lost(r, n < 0 && errno == EBADMSG                        ? SealedSocket::kBroken
                     : n < 0 && errno != ECONNRESET && errno != EPIPE ? "does not answer: its connection timed out"
                                                                      : "closed the connection: it ended or died");
      return;
    }
    p.got += n;
    p.heard_ns = now_ns();
    if (p.got >= kHead && !is_sane(p.frame)) {
      report_lost(r, "sent data that is not a heartbeat");
      return;
    }
    if (p.got < kHead || p.got < kHead + p.frame.text_bytes) continue;
    p.got = 0;
    take_frame(r);
  }
}

// Takes a whole frame of rank r.
void FailureDetector::take_frame(int r) {
  Peer& p = peers_[r];
  p.moved.store(p.frame.moved, std::memory_order_relaxed);
  p.waits_for.store(p.frame.waits_for, std::memory_order_relaxed);
  if (p.frame.kind == kLeft) p.gone = true;
  if (p.frame.kind == kGaveUp)
    report_lost(r, ("gave up: " + printable(std::string(p.frame.text, p.frame.text_bytes))).c_str());
}

void FailureDetector::look_at_transport(int r) {
  Peer& p = peers_[r];
  try {
    while (!p.gone) {
      Turn turn(*transport_);
      const int64_t n = transport_->receive_heartbeat(r, &p.frame, sizeof p.frame);
      if (n == 0) return;
      if (n < kHead || !is_sane(p.frame) || p.frame.text_bytes != n - kHead)
        fail(Status::comm, "sent data that is not a heartbeat");
      p.heard_ns = now_ns();
      take_frame(r);
    }
  } catch (const Error& error) { report_lost(r, error.what()); }
}

// Waits until every peer has left or has this rank's last bytes. A connection that is reset before is made again.
void FailureDetector::settle() {
  const int64_t end = now_ns() + timeout_ns_;
  bool has_settled = false;
  while (!has_settled && !lost() && now_ns() < end) {
    has_settled = true;
    for (int r = 0; r < int(peers_.size()); r++) {
      Peer& p = peers_[r];
      if (p.gone || !p.socket) continue;
      look_at_socket(r);
      has_settled = has_settled && (p.gone || transport_->has_settled(r));
    }
    if (!has_settled) poll(nullptr, 0, kSettleMs);
  }
}

void FailureDetector::run() {
  const int64_t period = period_ns(timeout_ns_), patience = timeout_ns_ - period;
  const int64_t asleep = std::min(3 * kMostPeriodNs, timeout_ns_ / 4);
  int64_t next = 0, looked = now_ns();
  std::vector<pollfd> watched;
  while (!ending_) {
    int64_t now = now_ns();
    // This process itself did not run (stopped by a terminal, or the machine slept). So the silence of its peers means
    // nothing.
    if (now - looked > asleep)
      for (Peer& p : peers_) p.heard_ns = now;
    looked = now;
    if (now >= next) {
      // Before the next heartbeat is sent: by now, the last one is acknowledged or was sent again.
      for (size_t r = 0; r < peers_.size(); r++)
        if (peers_[r].socket && !peers_[r].gone) transport_->mend_stalled(int(r));
      tell(kHeartbeat, "");
      next = now + period;
    }
    watched.assign(1, {wake_, POLLIN, 0});
    bool blind = false;
    for (size_t r = 0; r < peers_.size(); r++) {
      const Peer& p = peers_[r];
      if (p.gone) continue;
      if (p.socket && !p.socket->waits()) watched.push_back({p.socket->fd(), POLLIN, 0});
      if (p.process >= 0) watched.push_back({p.process, POLLIN, 0});
      blind |= !p.socket;
    }
    const int64_t nap = std::min(next - now, blind ? kLookNs : next - now);
    poll(watched.data(), watched.size(), int(std::max<int64_t>(1, nap / 1'000'000)));
    for (int r = 0; r < int(peers_.size()) && !ending_; r++) {
      Peer& p = peers_[r];
      if (p.gone) continue;
      if (p.local >= 0) look_at_local(r);
      else if (p.socket) look_at_socket(r);
      else look_at_transport(r);
      now = now_ns();
      if (p.gone || now - p.heard_ns < patience || now - looked > asleep) continue;
      char text[120];
      std::snprintf(text, sizeof text, "has not been heard of for %.1f s: it is stopped or cut off",
                    double(now - p.heard_ns) * 1e-9);
      report_lost(r, text);
    }
  }
  if (is_leaving_) settle();
}

}  // namespace ckdist
