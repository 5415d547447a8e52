#include "comm/transports/verbs_transport.h"

#if CKDIST_HAVE_VERBS
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr int kDepth = 256;                        // requests in flight to one peer
constexpr int64_t kRingBytes = int64_t(64) << 20;  // for all rings of a rank; they have 8 to 64 slots
constexpr int64_t kMaxVerbsMessage = int64_t(1) << 40;
constexpr int64_t kMaxEarly = int64_t(256) << 20;  // bytes held for receives that are not posted yet
constexpr size_t kWindowsAhead = 1024;
constexpr int64_t kLeaveNs = 2'000'000'000;  // time limit for data in flight when the transport closes

int slots_for(int size) {
  return int(std::clamp<int64_t>(kRingBytes / (2 * kVerbsSlotBytes) / std::max(1, size - 1), 8, 64));
}

}  // namespace

VerbsTransport::VerbsTransport(const char* device, int port, int gid_index, int rank, int size, double timeout_s)
    : Verbs(rank, size, timeout_s),
      rings_(nullptr, std::free),
      device_(device, port, gid_index),
      slots_(slots_for(size)),
      peers_(size) {
  const int64_t half = int64_t(size) * slots_ * kVerbsSlotBytes;
  void* rings = nullptr;
  if (posix_memalign(&rings, 4096, size_t(2 * half)))
    fail(Status::capacity, "no %lld bytes for the rings of %d ranks", (long long)(2 * half), size);
  rings_.reset(static_cast<uint8_t*>(rings));
  inbox_key_ = device_.register_memory(rings, half, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)->rkey;
  outbox_key_ = device_.register_memory(rings_.get() + half, half, 0)->lkey;

  const int entries = std::max(1, size - 1) * (kDepth + slots_);
  if (entries > device_.attributes.max_cqe)
    fail(Status::capacity, "%d ranks need a completion queue of %d entries; RDMA device %s has %d", size, entries,
         device, device_.attributes.max_cqe);
  device_.make_queue(entries);
  for (int p = 0; p < size; p++) {
    Peer& peer = peers_[p];
    peer.inbox = rings_.get() + int64_t(p) * slots_ * kVerbsSlotBytes;
    peer.outbox = peer.inbox + half;
    if (p == rank) continue;
    peer.credits = uint32_t(slots_);
    peer.pair = std::make_unique<VerbsQueuePair>(device_, uint32_t(p), kDepth, slots_);
    for (int i = 0; i < slots_; i++) peer.pair->post_receive();
  }
}

VerbsTransport::~VerbsTransport() { say_last(VerbsKind::kLeaving, "", kLeaveNs); }

void VerbsTransport::address(uint8_t* out) const {
  VerbsHost host = device_.host();
  host.slots = uint32_t(slots_);
  std::memcpy(out, &host, sizeof host);
  for (int p = 0; p < size; p++) {
    VerbsPair pair{};
    if (p != rank)
      pair = {uint64_t(peers_[p].inbox), inbox_key_, peers_[p].pair->number(), peers_[p].pair->sequence(), 0};
    std::memcpy(out + sizeof host + p * sizeof pair, &pair, sizeof pair);
  }
}

void VerbsTransport::connect(const uint8_t* all) {
  if (connected_) fail(Status::native, "the transport is connected already");
  // A packet is sent seven times, all within half the timeout. Devices may wait four times as long as configured.
  const int exponent = std::clamp(int(std::log2(double(timeout_ns) / 2 / 7 / 4096)), 12, 18);
  for (int p = 0; p < size; p++) {
    if (p == rank) continue;
    const uint8_t* from = all + p * address_bytes(size);
    VerbsHost host;
    VerbsPair pair;
    std::memcpy(&host, from, sizeof host);
    std::memcpy(&pair, from + sizeof host + rank * sizeof pair, sizeof pair);
    if (std::memcmp(host.magic, "ckverbs1", 8))
      fail(Status::comm,
           "rank %d gave an address that is not one of verbs; start all ranks with the same version and transport", p);
    if (host.slots != uint32_t(slots_) || host.slot_bytes != kVerbsSlotBytes)
      fail(Status::comm,
           "rank %d has rings of %u slots of %u bytes, this rank of %d of %u; start all ranks with the same version", p,
           host.slots, host.slot_bytes, slots_, kVerbsSlotBytes);
    if (bool(host.ethernet) != device_.ethernet())
      fail(Status::comm, "rank %d is on %s and this rank on %s", p, host.ethernet ? "Ethernet" : "InfiniBand",
           host.ethernet ? "InfiniBand" : "Ethernet");
    peers_[p].ring = {pair.ring, pair.ring_key};
    peers_[p].pair->connect(host, pair, exponent);
    peers_[p].heard_ns = now_ns();
  }
  connected_ = true;
}

bool VerbsTransport::register_memory(void* base, int64_t bytes) {
  if (bytes <= 0) fail(Status::config, "%lld bytes cannot be registered", (long long)bytes);
  if (!registered(base, bytes))
    arenas_.push_back(device_.register_memory(
        base, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
  return true;
}

void VerbsTransport::forget_memory(void* base) {
  const auto arena = std::find_if(arenas_.begin(), arenas_.end(), [&](const ibv_mr* a) { return a->addr == base; });
  if (arena == arenas_.end()) return;
  device_.release(*arena);
  arenas_.erase(arena);
}

ibv_mr* VerbsTransport::registered(const void* base, int64_t bytes) const {
  for (ibv_mr* arena : arenas_)
    if (base >= arena->addr &&
        static_cast<const uint8_t*>(base) + bytes <= static_cast<uint8_t*>(arena->addr) + arena->length)
      return arena;
  return nullptr;
}

// access: ibv_access_flags of the buffer, or kNoKey if it needs no key. If no arena holds the buffer, it is registered
// for the operation's lifetime. If that fails, no operation is in use.
uint32_t VerbsTransport::begin(What what, int peer, void* data, int64_t bytes, int access) {
  if (unused_.empty()) {
    operations_.emplace_back();
    unused_.push_back(uint32_t(operations_.size()));
  }
  Operation o;
  o.used = true, o.what = what, o.peer = peer, o.data = static_cast<uint8_t*>(data), o.bytes = bytes;
  if (access != kNoKey) {
    ibv_mr* region = registered(data, bytes);
    if (!region) region = o.region = device_.register_memory(data, bytes, access);
    o.key = access & IBV_ACCESS_REMOTE_WRITE ? region->rkey : region->lkey;
  }
  const uint32_t operation = unused_.back();
  unused_.pop_back();
  o.generation = operations_[operation - 1].generation;
  operations_[operation - 1] = o;
  if (!peers_[peer].pending++) peers_[peer].heard_ns = now_ns();
  return operation;
}

void VerbsTransport::finish(uint32_t operation) {
  if (!operation) return;
  Operation& o = operations_[operation - 1];
  if (o.region) device_.release(o.region);
  o.region = nullptr;
  o.done = true;
  peers_[o.peer].pending--;
}

bool VerbsTransport::test(Request request) {
  if (!request) return true;
  const uint32_t operation = uint32_t(request), generation = uint32_t(request >> 32);
  if (operation == 0 || operation > operations_.size()) fail(Status::native, "a request that was never begun");
  if (!operations_[operation - 1].done) progress();
  Operation& o = operations_[operation - 1];
  if (!o.used || o.generation != generation) fail(Status::native, "a request that was complete already");
  if (!o.done) {
    if (!peers_[o.peer].lost.empty()) lost(o.peer);
    if (peers_[o.peer].left && o.what == What::receive)
      fail(Status::comm, "rank %d ended, and a message of it was awaited", o.peer);
    if (gave_up_ >= 0) lost(gave_up_);  // waiting for other ranks could never end
    return false;
  }
  o.used = false;
  o.generation++;
  unused_.push_back(operation);
  return true;
}

VerbsTransport::Operation& VerbsTransport::expect(int peer, uint32_t operation, What what) {
  if (operation >= 1 && operation <= operations_.size()) {
    Operation& o = operations_[operation - 1];
    if (o.used && !o.done && o.open && o.peer == peer && o.what == what) {
      o.open = false;
      return o;
    }
  }
  lose(peer, "answered a request that was not made");
  lost(peer);
}

VerbsTransport::Peer& VerbsTransport::reachable(int peer) {
  if (peer < 0 || peer >= size || peer == rank)
    fail(Status::config, "rank %d cannot be reached from rank %d of %d", peer, rank, size);
  if (!connected_) fail(Status::native, "the transport is not connected");
  if (!peers_[peer].lost.empty()) lost(peer);
  if (peers_[peer].left) fail(Status::comm, "rank %d ended", peer);
  return peers_[peer];
}

void VerbsTransport::lost(int peer) const { fail(Status::comm, "%s %s", who(peer).c_str(), peers_[peer].lost.c_str()); }

void VerbsTransport::lose(int peer, const std::string& why) {
  Peer& p = peers_[peer];
  if (!p.lost.empty()) return;
  p.lost = why;
  p.pair->stop();
  waiting_ -= int(p.work.size());
  p.work.clear();
}

Transport::Request VerbsTransport::isend(int peer, int tag, const void* data, int64_t bytes) {
  Peer& to = reachable(peer);
  if (bytes < 0 || bytes > kMaxVerbsMessage)
    fail(Status::config, "a message of %lld bytes; at most %lld can be sent", (long long)bytes,
         (long long)kMaxVerbsMessage);
  Work work{Work::frame};
  work.header.tag = tag;
  work.header.key = mark;
  work.header.bytes = bytes;
  if (bytes <= kVerbsEager) {
    work.header.kind = VerbsKind::kMessage;
    if (to.work.empty() && post_frame(to, work.header, data, bytes, 1)) return 0;
    work.data = static_cast<const uint8_t*>(data);
    work.bytes = bytes;
  }
  const uint32_t operation = begin(What::send, peer, const_cast<void*>(data), bytes, bytes <= kVerbsEager ? kNoKey : 0);
  if (bytes <= kVerbsEager) {
    work.operation = operation;
  } else {
    operations_[operation - 1].open = true;
    work.header.kind = VerbsKind::kOffer;
    work.header.id = operation;
  }
  enqueue(peer, std::move(work));
  return ticket(operation);
}

Transport::Request VerbsTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  Peer& from = peers_[peer < 0 || peer >= size ? rank : peer];
  const auto offer =
      std::find_if(from.unexpected.begin(), from.unexpected.end(), [&](const Offer& o) { return o.tag == tag; });
  const int access = bytes <= kVerbsEager ? kNoKey : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (offer == from.unexpected.end()) {
    reachable(peer);
    const uint32_t operation = begin(What::receive, peer, data, bytes, access);
    from.posted.push_back({tag, mark, operation});
    return ticket(operation);
  }
  check_match(peer, offer->bytes, offer->mark, bytes, mark);
  if (offer->here) {
    if (bytes) std::memcpy(data, offer->data.data(), size_t(bytes));
    unexpected_bytes_ -= bytes;
    from.unexpected.erase(offer);
    return 0;
  }
  reachable(peer);
  const uint32_t operation = begin(What::receive, peer, data, bytes, access), id = offer->id;
  from.unexpected.erase(offer);
  accept(peer, operation, id);
  return ticket(operation);
}

void VerbsTransport::check_match(int peer, int64_t sent, uint32_t sent_mark, int64_t bytes, uint32_t mark) const {
  const std::string wrong = mismatch(sent, sent_mark, bytes, mark);
  if (!wrong.empty()) fail(Status::comm, "%s %s", who(peer).c_str(), wrong.c_str());
}

void VerbsTransport::accept(int peer, uint32_t operation, uint32_t id) {
  Operation& o = operations_[operation - 1];
  o.open = true;
  Work work{Work::frame};
  work.header.kind = VerbsKind::kAccept;
  work.header.id = id;
  work.header.answer = operation;
  work.header.key = o.key;
  work.header.address = uint64_t(o.data);
  work.header.bytes = o.bytes;
  enqueue(peer, std::move(work));
}

void VerbsTransport::take_message(int peer, const VerbsFrame& frame, const uint8_t* data) {
  Peer& from = peers_[peer];
  const bool here = frame.kind == VerbsKind::kMessage;
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == frame.tag; });
  if (posted == from.posted.end()) {
    const int64_t held = unexpected_bytes_ + (here ? frame.bytes : 0);
    if (held > kMaxEarly || from.unexpected.size() >= size_t(kMaxEarly / kVerbsSlotBytes))
      return lose(peer, "sent more than is held for receives that are not posted yet: " + std::to_string(held) +
                            " bytes in " + std::to_string(from.unexpected.size() + 1) + " messages");
    from.unexpected.push_back({frame.tag, frame.key, frame.bytes, frame.id, here, {}});
    if (here) from.unexpected.back().data.assign(data, data + frame.bytes);
    unexpected_bytes_ = held;
    return;
  }
  const uint32_t operation = posted->operation;
  const Operation& o = operations_[operation - 1];
  check_match(peer, frame.bytes, frame.key, o.bytes, posted->mark);
  from.posted.erase(posted);
  if (!here) return accept(peer, operation, frame.id);
  if (frame.bytes) std::memcpy(o.data, data, size_t(frame.bytes));
  finish(operation);
}

void VerbsTransport::take_window(int peer, const VerbsFrame& frame) {
  Peer& from = peers_[peer];
  // A peer may be ahead of this rank, but all ranks expose the same windows.
  if (!from.windows.count(frame.tag) && from.windows.size() >= windows_.size() + kWindowsAhead)
    return refuse(peer, frame, "more windows than all ranks have");
  from.windows[frame.tag] = {frame.address, frame.bytes, frame.key, frame.id};
  flush(peer);
}

void VerbsTransport::expose(int window, void* base, int64_t bytes) {
  if (bytes < 0) fail(Status::config, "a window of %lld bytes", (long long)bytes);
  ibv_mr *region = nullptr, *only = nullptr;  // of the memory; registered only for this window
  if (bytes && !(region = registered(base, bytes)))
    region = only =
        device_.register_memory(base, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  const uint32_t key = region ? region->rkey : 0;
  Window& own = windows_[window];
  if (own.region) device_.release(own.region);
  own.region = only;
  own.bytes = bytes;
  own.times++;
  for (int p = 0; p < size; p++) {
    if (p == rank || !peers_[p].lost.empty() || peers_[p].left) continue;
    reachable(p);
    Work work{Work::frame};
    work.header.kind = VerbsKind::kWindow;
    work.header.tag = window;
    work.header.id = own.times;
    work.header.key = key;
    work.header.address = uint64_t(base);
    work.header.bytes = bytes;
    enqueue(p, std::move(work));
  }
}

// A put or a get. Its data is registered here unless it fits into the work request.
Transport::Request VerbsTransport::access(What what, int peer, int window, int64_t offset, void* data, int64_t bytes) {
  const Peer& to = reachable(peer);
  const bool put = what == What::put;
  if (offset < 0 || bytes < 0)
    fail(Status::config, "%s of %lld bytes at offset %lld", put ? "put" : "get", (long long)bytes, (long long)offset);
  const int flags = bytes <= (put ? to.pair->inline_bytes() : 0) ? kNoKey : put ? 0 : IBV_ACCESS_LOCAL_WRITE;
  const uint32_t operation = begin(what, peer, data, bytes, flags);
  Work work{put ? Work::put : Work::get};
  work.header.tag = window;
  work.header.address = uint64_t(offset);
  work.operation = operation;
  work.data = static_cast<const uint8_t*>(data);
  work.bytes = bytes;
  enqueue(peer, std::move(work));
  return ticket(operation);
}

Transport::Request VerbsTransport::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  return access(What::put, peer, window, offset, const_cast<void*>(data), bytes);
}

Transport::Request VerbsTransport::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  return access(What::get, peer, window, offset, data, bytes);
}

Transport::Request VerbsTransport::inotify(int peer, int window, int slot) {
  Peer& to = reachable(peer);
  Work work{Work::frame};
  check_slot(slot);
  work.header.kind = VerbsKind::kNotify;
  work.header.tag = window;
  work.header.id = uint32_t(slot);
  if (to.work.empty() && post_frame(to, work.header, nullptr, 0, 1)) return 0;
  work.operation = begin(What::notify, peer, nullptr, 0, kNoKey);
  const uint32_t operation = work.operation;
  enqueue(peer, std::move(work));
  return ticket(operation);
}

uint64_t VerbsTransport::notified(int window, int slot) {
  progress();
  if (gave_up_ >= 0) lost(gave_up_);
  const auto own = windows_.find(window);
  if (own == windows_.end()) fail(Status::config, "window %d is not exposed", window);
  const auto count = own->second.notified.find(slot);
  return count == own->second.notified.end() ? 0 : count->second;
}

}  // namespace ckdist
#endif
