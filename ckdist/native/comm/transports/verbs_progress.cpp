// The progress of the Verbs transport: posts waiting work, receives frames, and detects lost peers.
#include <endian.h>
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "comm/transports/verbs_transport.h"
#include "core/error.h"

#if CKDIST_HAVE_VERBS
namespace ckdist {

namespace {

// Bytes of one RDMA request. Each completed request counts as progress for the peers.
constexpr int64_t kMaxRequest = int64_t(4) << 20;
constexpr int64_t kGoodbyeNs = 200'000'000;  // time limit for its arrival
constexpr int64_t kWatchNs = 50'000'000;
constexpr int64_t kSilenceNs = 500'000'000;      // then a peer that is waited for is probed
constexpr int64_t kPortGraceNs = 1'000'000'000;  // a link may recover
constexpr int kEventMs = 100;                    // longest wait for the event behind an error
constexpr uint32_t kWatchPolls = 512;            // polls between two reads of the clock
constexpr uint32_t kYields = 200;                // number of yields before idle() sleeps in the kernel
constexpr int kBatch = 16;

}  // namespace

void VerbsTransport::enqueue(int peer, Work work) {
  peers_[peer].work.push_back(std::move(work));
  waiting_++;
  flush(peer);
}

void VerbsTransport::flush(int peer) {
  Peer& to = peers_[peer];
  while (!to.work.empty() && post(peer, to.work.front())) {
    if (to.work.empty()) return;  // the peer has been lost since
    to.work.pop_front();
    waiting_--;
  }
}

bool VerbsTransport::post(int peer, Work& work) {
  Peer& to = peers_[peer];
  if (work.kind == Work::frame) {
    if (!post_frame(to, work.header, work.data, work.bytes, 1)) return false;
    finish(work.operation);
    return true;
  }
  if (work.kind == Work::write) return post_data(peer, work, {work.header.address, work.header.key});
  const auto window = to.windows.find(work.header.tag);
  const auto own = windows_.find(work.header.tag);
  const uint32_t times = own == windows_.end() ? 1 : own->second.times;
  if (window == to.windows.end() || window->second.times < times) return false;  // not exposed there yet
  const Exposed& there = window->second;
  const int64_t offset = int64_t(work.header.address);
  if (offset > there.bytes || work.bytes > there.bytes - offset)
    fail(Status::comm, "bytes %lld to %lld of window %d were addressed at rank %d, which exposes %lld",
         (long long)offset, (long long)(offset + work.bytes), work.header.tag, peer, (long long)there.bytes);
  return post_data(peer, work, {there.address + uint64_t(offset), there.key});
}

// Long data is sent in several requests. The operation ends with the last.
bool VerbsTransport::post_data(int peer, Work& work, VerbsRemote at) {
  Peer& to = peers_[peer];
  if (work.bytes == 0) return finish(work.operation), true;
  const Operation& o = operations_[work.operation - 1];
  while (work.done < work.bytes) {
    if (!to.pair->room()) return false;
    const uint32_t bytes = uint32_t(std::min(work.bytes - work.done, kMaxRequest));
    const bool last = work.done + bytes == work.bytes;
    const VerbsRemote there{at.address + uint64_t(work.done), at.key};
    uint8_t* data = const_cast<uint8_t*>(work.data) + work.done;
    const bool inside = work.kind != Work::get && work.bytes <= to.pair->inline_bytes();
    const uint64_t number = work.kind == Work::get ? to.pair->read(data, bytes, o.key, there)
                                                   : to.pair->write(data, bytes, o.key, there, !inside);
    work.done += bytes;
    if (inside) finish(work.operation);  // the data is already copied to the device
    else to.under_way.push_back({number, last ? work.operation : 0, bytes});
  }
  return true;
}

// `keep`: credits that must remain. A frame is in the outbox slot with the number of its inbox slot. When the peer has
// returned the inbox slot, the outbox slot has been read.
bool VerbsTransport::post_frame(Peer& to, VerbsFrame header, const void* data, int64_t bytes, uint32_t keep) {
  if (to.credits <= keep || !to.pair->room()) return false;
  const uint32_t slot = uint32_t(to.sent % uint64_t(slots_));
  uint8_t* out = to.outbox + int64_t(slot) * kVerbsSlotBytes;
  header.credits = to.owed;
  std::memcpy(out, &header, sizeof header);
  if (bytes) std::memcpy(out + sizeof header, data, size_t(bytes));
  to.pair->write_frame(out, uint32_t(sizeof header + bytes), outbox_key_,
                       {to.ring.address + uint64_t(slot) * kVerbsSlotBytes, to.ring.key}, slot);
  to.sent++;
  to.credits--;
  to.owed = 0;
  return true;
}

void VerbsTransport::abandon(const char* reason) { say_last(VerbsKind::kGoodbye, reason, kGoodbyeNs); }

// Sends a last frame to every peer. It must arrive before its queue pair is destroyed, after all earlier data. A
// signalled request after it confirms the arrival. Peers that are lost or have left are not waited for.
void VerbsTransport::say_last(VerbsKind kind, const char* text, int64_t most_ns) {
  if (!connected_) return;
  VerbsFrame header{};
  header.kind = kind;
  header.bytes = std::min<int64_t>(int64_t(std::strlen(text)), kVerbsMaxReason);
  const int64_t end = now_ns() + std::min(most_ns, timeout_ns);
  const auto there = [](const Peer& p) { return p.pair && p.lost.empty() && !p.left; };
  try {
    progress();             // finds out who has left
  } catch (const Error&) {  // already known, or reported soon
  }
  try {
    for (Peer& peer : peers_) {
      if (!there(peer)) continue;
      post_frame(peer, header, text, header.bytes, 0);
      if (peer.pair->room()) peer.pair->write(nullptr, 0, 0, peer.ring, true);
    }
    while (now_ns() < end &&
           std::any_of(peers_.begin(), peers_.end(), [&](const Peer& p) { return there(p) && !p.pair->quiet(); }))
      if (!progress()) sched_yield();
  } catch (const Error&) {  // a peer or the device is gone, and no caller needs the error
  }
}

bool VerbsTransport::progress() {
  bool any = false;
  ibv_wc entries[kBatch];
  for (int count = kBatch; count == kBatch;) {
    count = ibv_poll_cq(device_.queue(), kBatch, entries);
    if (count < 0) fail(Status::comm, "the completion queue of RDMA device %s failed", device_.name.c_str());
    for (int i = 0; i < count; i++) {
      const int peer = int(VerbsQueuePair::peer_of(entries[i].wr_id));
      if (peers_[peer].lost.empty()) ended(peer, entries[i]);
      any = true;
    }
  }
  if (any) {
    idles_ = 0;
    for (int p = 0; p < size && waiting_; p++) flush(p);
    return_credits();
  } else if (++polls_ % kWatchPolls == 0) {
    watch();
  }
  return any;
}

// Sends credits in a frame of their own if a peer is owed half of its credits.
void VerbsTransport::return_credits() {
  VerbsFrame credits{};
  credits.kind = VerbsKind::kCredits;
  for (Peer& peer : peers_)
    if (peer.owed >= uint32_t(slots_) / 2 && peer.lost.empty() && !peer.left) post_frame(peer, credits, nullptr, 0, 0);
}

void VerbsTransport::ended(int peer, const ibv_wc& entry) {
  Peer& p = peers_[peer];
  const uint64_t number = VerbsQueuePair::number_of(entry.wr_id);
  if (entry.status != IBV_WC_SUCCESS) {
    take_events();
    if (p.left) return lose(peer, "ended");
    if (device_.down_since()) return lose(peer, port_down());
    if (entry.status == IBV_WC_RETRY_EXC_ERR)
      return lose(peer, "does not answer over " + device_.name + ": its process or the link to it is gone");
    if (entry.status == IBV_WC_WR_FLUSH_ERR) return lose(peer, "was disconnected from " + device_.name);
    // The event of a link that goes down may come after the error.
    for (int i = 0; i < kEventMs && p.lost.empty() && !device_.down_since(); i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      take_events();
    }
    if (device_.down_since()) return lose(peer, port_down());
    return lose(peer, "could not be reached over " + device_.name + ": " + verbs_library().wc_status_str(entry.status));
  }
  p.heard_ns = now_ns();
  if (number == 0) return arrived(peer, entry);
  p.pair->completed(number);
  while (!p.under_way.empty() && p.under_way.front().number <= number) {
    add_moved(p.under_way.front().bytes);
    finish(p.under_way.front().operation);
    p.under_way.pop_front();
  }
}

void VerbsTransport::arrived(int peer, const ibv_wc& entry) {
  Peer& from = peers_[peer];
  const uint32_t slot = uint32_t(from.received % uint64_t(slots_));
  const uint8_t* in = from.inbox + int64_t(slot) * kVerbsSlotBytes;
  VerbsFrame frame;
  std::memcpy(&frame, in, sizeof frame);
  if (!(entry.wc_flags & IBV_WC_WITH_IMM) || be32toh(entry.imm_data) != slot)
    return lose(peer, "sent something that is not a frame");
  if (const char* const rule = broken_rule(frame, entry.byte_len)) return refuse(peer, frame, rule);
  if (frame.credits > uint32_t(slots_) - from.credits) return refuse(peer, frame, "more credits than there are");
  from.received++;
  from.credits += frame.credits;
  take(peer, frame, in + sizeof frame);
  if (!from.lost.empty()) return;
  from.pair->post_receive();
  from.owed++;
}

void VerbsTransport::take(int peer, const VerbsFrame& frame, const uint8_t* data) {
  Peer& from = peers_[peer];
  switch (frame.kind) {
    case VerbsKind::kMessage:
    case VerbsKind::kOffer: return take_message(peer, frame, data);
    case VerbsKind::kAccept: {
      const Operation& o = expect(peer, frame.id, What::send);
      if (o.bytes != frame.bytes) return lose(peer, "accepted another message than was offered");
      Work write{Work::write}, announce{Work::frame};
      write.header = frame;
      write.operation = frame.id;
      write.data = o.data;
      write.bytes = o.bytes;
      announce.header.kind = VerbsKind::kArrived;
      announce.header.id = frame.answer;
      enqueue(peer, std::move(write));
      enqueue(peer, std::move(announce));
      return;
    }
    case VerbsKind::kArrived: expect(peer, frame.id, What::receive); return finish(frame.id);
    case VerbsKind::kWindow: return take_window(peer, frame);
    case VerbsKind::kNotify: {
      const auto own = windows_.find(frame.tag);
      if (own == windows_.end()) return refuse(peer, frame, "this rank did not expose such a window");
      own->second.notified[int(frame.id)]++;
      return;
    }
    case VerbsKind::kCredits: return;
    case VerbsKind::kGoodbye:
      return gave_up(peer, std::string(reinterpret_cast<const char*>(data), size_t(frame.bytes)));
    case VerbsKind::kLeaving: from.left = true; return;
  }
}

void VerbsTransport::refuse(int peer, const VerbsFrame& f, const char* rule) {
  char text[200];
  std::snprintf(text, sizeof text, "sent a bad frame (kind %u, tag %d, id %u, %lld bytes): %s", unsigned(f.kind), f.tag,
                f.id, (long long)f.bytes, rule);
  lose(peer, text);
}

void VerbsTransport::gave_up(int peer, const std::string& reason) {
  lose(peer, "gave up: " + (reason.empty() ? "no reason given" : printable(reason)));
  if (gave_up_ < 0) gave_up_ = peer;
}

std::string VerbsTransport::port_down() const {
  return "cannot be reached: port " + std::to_string(device_.port) + " of RDMA device " + device_.name + " went down";
}

void VerbsTransport::take_events() {
  ibv_qp* failed;
  while (device_.take_event(&failed))
    for (int p = 0; failed && p < size; p++)
      if (peers_[p].pair && peers_[p].pair->is(failed))
        lose(p, device_.down_since() ? port_down() : "was disconnected from " + device_.name);
}

void VerbsTransport::watch() {
  const int64_t now = now_ns();
  if (now - watched_ns_ < kWatchNs) return;
  watched_ns_ = now;
  take_events();
  std::string why;
  if (device_.lost()) why = "cannot be reached: RDMA device " + device_.name + " failed";
  if (device_.down_since() && now - device_.down_since() > std::min(kPortGraceNs, timeout_ns / 4)) why = port_down();
  for (int p = 0; p < size; p++) {
    Peer& peer = peers_[p];
    if (!peer.pair || !peer.lost.empty()) continue;
    if (!why.empty()) {
      lose(p, why);
    } else if (peer.pending && now - peer.heard_ns > kSilenceNs && peer.pair->room()) {
      peer.pair->write(nullptr, 0, 0, peer.ring,
                       true);  // only the peer's device answers an empty write, not its program
      peer.heard_ns = now;
    }
  }
}

void VerbsTransport::idle(int64_t ns) {
  if (++idles_ < kYields) {
    sched_yield();
    return;
  }
  watch();
  device_.arm();
  if (!progress()) device_.sleep(ns);
}

}  // namespace ckdist
#endif
