#include "comm/transports/stream_transport.h"

#include <algorithm>
#include <cstdarg>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kPlaceAt = 32 << 10;                // messages of at least this size are read in place, if possible
constexpr int64_t kMaxUnexpected = int64_t(2) << 30;  // bytes held for receives that are not posted yet
constexpr int kMaxGets = 1 << 16;                     // in flight to one rank
}  // namespace

StreamTransport::StreamTransport(int rank, int size, double timeout_s)
    : Transport(rank, size, timeout_s), pool_({0, size_t(KeptBytes::kPooled)}) {
  for (int i = 0; i < size; i++) peers_.emplace_back(&pool_);
}

std::shared_ptr<StreamTransport::Message> StreamTransport::new_message(const FrameHeader& h) {
  auto message = std::allocate_shared<Message>(std::pmr::polymorphic_allocator<Message>(&pool_), &pool_);
  message->bytes = h.total, message->tag = h.tag, message->mark = h.mark;
  message->sequence = h.sequence;
  return message;
}

int64_t StreamTransport::Message::held() const {
  constexpr int64_t kOwn = 64;  // bytes of the pool and of the queue
  return kOwn + int64_t(sizeof(Message)) + (place ? 0 : bytes);
}

// Stops reading from a peer, so that no memory is written that callers reuse after this error. Later calls that need
// the peer fail with the same error.
void StreamTransport::cut_off(int peer, const char* format, ...) {
  char text[300];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  peers_[peer].refused = true;
  peers_[peer].end = text;
  lost(peer, text);
}

void StreamTransport::refuse(int peer, const FrameHeader& h, const char* rule) {
  if (rule == kNoFrame) cut_off(peer, "sent something that is not a frame (%s)", describe(h).c_str());
  cut_off(peer, "sent a bad frame (%s): %s", describe(h).c_str(), rule);
}

void StreamTransport::lost(int peer, const char* how) const {
  const std::string& reason = peers_[peer].goodbye;
  if (!reason.empty()) fail(Status::comm, "%s gave up: %s", who(name_of(peer)).c_str(), reason.c_str());
  fail(Status::comm, "%s %s", who(name_of(peer)).c_str(), how);
}

void StreamTransport::check_peer(int peer) const {
  if (peer < 0 || peer >= size || peer == rank)
    fail(Status::config, "rank %d cannot be reached from rank %d of %d", peer, rank, size);
  const Peer& p = peers_[peer];
  if (!p.goodbye.empty() || p.ended || p.refused) lost(peer, p.end.c_str());
}

// A peer that has finished may leave. It is lost only for ranks that still wait for it.
void StreamTransport::ended(int peer, const char* how) {
  peers_[peer].ended = true;
  if (!peers_[peer].refused) peers_[peer].end = how;
}

bool StreamTransport::awaited(int peer) const {
  const Peer& p = peers_[peer];
  return !p.posted.empty() || !p.gets.empty() || !p.lent.empty() || !p.out.empty() || p.message;
}

Transport::Request StreamTransport::begin() {
  if (idle_operations_.empty()) operations_.emplace_back(), idle_operations_.push_back(uint32_t(operations_.size()));
  const uint32_t index = idle_operations_.back();
  idle_operations_.pop_back();
  operations_[index - 1].done = false;
  return Request(operations_[index - 1].generation) << 32 | index;
}

void StreamTransport::finish(uint32_t request) {
  if (request) operations_[request - 1].done = true;
}

void StreamTransport::push(int peer, const FrameHeader& header, const void* data, uint32_t request, std::string kept) {
  auto& out = peers_[peer].out;
  out.push_back({header, 0, static_cast<const uint8_t*>(data), request, std::move(kept)});
  if (!out.back().kept.empty()) out.back().data = reinterpret_cast<const uint8_t*>(out.back().kept.data());
  if (out.size() == 1) drain(peer);
}

Transport::Request StreamTransport::isend(int peer, int tag, const void* data, int64_t bytes) {
  check_peer(peer);
  if (bytes < 0 || bytes > kMaxMessage)
    fail(Status::config, "a message of %lld bytes; at most %lld can be sent", (long long)bytes, (long long)kMaxMessage);
  const Request request = begin();
  const uint64_t sequence = peers_[peer].sent++;
  if (const int64_t place = bytes >= kPlaceAt ? placed(data, bytes) : -1; place >= 0) {
    peers_[peer].lent[sequence] = uint32_t(request);
    push(peer, {kFrameMagic, FrameKind::placed, {}, tag, mark, sequence, place, 0, bytes}, nullptr, 0);
  } else {
    push(peer, {kFrameMagic, FrameKind::message, {}, tag, mark, sequence, 0, bytes, bytes}, data, uint32_t(request));
  }
  return request;
}

Transport::Request StreamTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  if (peer < 0 || peer >= size || peer == rank) check_peer(peer);
  Peer& from = peers_[peer];
  const auto early =
      std::find_if(from.unexpected.begin(), from.unexpected.end(), [&](const auto& m) { return m->tag == tag; });
  if (early == from.unexpected.end()) {
    check_peer(peer);
    const Request request = begin();
    from.posted.push_back({tag, static_cast<uint8_t*>(data), bytes, uint32_t(request), mark});
    return request;
  }
  const std::shared_ptr<Message> message = *early;
  check_match(peer, *message, bytes, mark);
  from.unexpected.erase(early);
  unexpected_bytes_ -= message->held();
  const Request request = begin();
  message->request = uint32_t(request), message->data = static_cast<uint8_t*>(data);
  if (message->place) take(peer, *message);
  else if (message->arrived) deliver(*message);
  return request;
}

void StreamTransport::check_match(int peer, const Message& message, int64_t bytes, uint32_t mark) {
  const std::string wrong = mismatch(message.bytes, message.mark, bytes, mark);
  if (!wrong.empty()) cut_off(peer, "%s", wrong.c_str());
}

void StreamTransport::hold(int peer, const std::shared_ptr<Message>& message) {
  if (unexpected_bytes_ + message->held() > kMaxUnexpected)
    cut_off(peer, "sent %lld bytes that nobody receives, to %lld of others; at most %lld are held",
            (long long)message->held(), (long long)unexpected_bytes_, (long long)kMaxUnexpected);
  unexpected_bytes_ += message->held();
  peers_[peer].unexpected.push_back(message);
}

// Hands a message that has arrived whole to its receiver.
void StreamTransport::deliver(const Message& message) {
  if (message.kept.data()) std::memcpy(message.data, message.kept.data(), size_t(message.bytes));
  finish(message.request);
}

void StreamTransport::take(int peer, const Message& message) {
  std::memcpy(message.data, message.place, size_t(message.bytes));
  add_moved(message.bytes);
  finish(message.request);
  push(peer, {kFrameMagic, FrameKind::taken, {}, 0, 0, message.sequence, 0, 0, 0}, nullptr, 0);
}

void StreamTransport::expose(int window, void* base, int64_t bytes) {
  Window& w = windows_[window];
  w.base = static_cast<uint8_t*>(base), w.bytes = bytes;
}

Transport::Request StreamTransport::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  check_peer(peer);
  const Request request = begin();
  push(peer, {kFrameMagic, FrameKind::put, {}, window, 0, 0, offset, bytes, bytes}, data, uint32_t(request));
  return request;
}

Transport::Request StreamTransport::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  check_peer(peer);
  if (peers_[peer].gets.size() >= kMaxGets)
    fail(Status::config, "%d gets of rank %d are under way; wait for some before the next", kMaxGets, name_of(peer));
  const Request request = begin();
  const uint64_t number = ++get_count_;
  peers_[peer].gets[number] = {window, static_cast<uint8_t*>(data), bytes, uint32_t(request), 0};
  push(peer, {kFrameMagic, FrameKind::get, {}, window, 0, number, offset, 0, bytes}, nullptr, 0);
  return request;
}

Transport::Request StreamTransport::inotify(int peer, int window, int slot) {
  check_peer(peer);
  check_slot(slot);
  const Request request = begin();
  push(peer, {kFrameMagic, FrameKind::notify, {}, window, 0, 0, slot, 0, 0}, nullptr, uint32_t(request));
  return request;
}

uint64_t StreamTransport::notified(int window, int slot) {
  progress();
  return windows_[window].notified[slot];
}

bool StreamTransport::test(Request request) {
  if (!request) return true;
  const uint32_t index = uint32_t(request), generation = uint32_t(request >> 32);
  if (index == 0 || index > operations_.size() || operations_[index - 1].generation != generation)
    fail(Status::native, "a request that was complete already");
  if (!operations_[index - 1].done) progress();
  Operation& o = operations_[index - 1];
  if (!o.done) return false;
  if (++o.generation == 0) o.generation = 1;
  idle_operations_.push_back(index);
  return true;
}

void StreamTransport::progress() {
  if (!gave_up_.empty()) fail(Status::comm, "%s", gave_up_.c_str());
  look();
  for (int k = 1; k < size; k++) {
    const int peer = (rank + k) % size;
    drain(peer);
    while (fill(peer)) {}
    const Peer& p = peers_[peer];
    if ((p.ended || p.refused) && awaited(peer)) lost(peer, p.end.c_str());
  }
}

// Writes until the stream is full.
void StreamTransport::drain(int peer) {
  Peer& to = peers_[peer];
  constexpr int64_t kHeader = sizeof(FrameHeader);
  while (!to.ended && !to.out.empty()) {
    Outgoing& o = to.out.front();
    while (o.sent < kHeader + o.header.bytes) {
      const bool head = o.sent < kHeader;
      const void* from = head ? reinterpret_cast<const uint8_t*>(&o.header) + o.sent : o.data + (o.sent - kHeader);
      const int64_t n = write(peer, from, head ? kHeader - o.sent : o.header.bytes - (o.sent - kHeader));
      if (n == 0) return;
      o.sent += n;
      add_moved(n);
    }
    if (!flush(peer)) return;
    finish(o.request);
    to.answers -= o.header.kind == FrameKind::got;
    to.out.pop_front();
  }
}

// Reads available data. Returns true if a frame is complete and more may follow.
bool StreamTransport::fill(int peer) {
  Peer& from = peers_[peer];
  if (from.ended || from.refused) return false;
  if (!from.in_data) {
    while (from.got < int64_t(sizeof(FrameHeader))) {
      const int64_t n =
          read(peer, reinterpret_cast<uint8_t*>(&from.header) + from.got, int64_t(sizeof(FrameHeader)) - from.got);
      if (n == 0) return false;
      from.got += n;
      add_moved(n);
    }
    open_frame(peer);
    from.in_data = true, from.got = 0;
  }
  const int64_t bytes = from.header.bytes;
  while (from.got < bytes) {
    if (from.got == from.room) place_data(from);
    const int64_t n = read(peer, from.to + from.got, from.room - from.got);
    if (n == 0) return false;
    from.got += n;
    add_moved(n);
  }
  from.in_data = false, from.got = 0;
  close_frame(peer);
  return true;
}

// Sets the destination of the next data of a message: the receiver's buffer, or else memory that grows.
void StreamTransport::place_data(Peer& from) {
  const int64_t bytes = from.header.bytes;
  Message& message = *from.message;
  if (message.request && !message.kept.data()) {
    from.to = message.data;
    from.room = bytes;
    return;
  }
  message.kept.grow(bytes);
  from.to = message.kept.data();
  from.room = std::min(message.kept.room(), bytes);
}

// The receiver has copied a placed message.
void StreamTransport::open_taken(int peer, const FrameHeader& h) {
  Peer& from = peers_[peer];
  const auto lent = from.lent.find(h.sequence);
  if (lent == from.lent.end()) refuse(peer, h, "no such message was sent");
  finish(lent->second);
  from.lent.erase(lent);
}

void StreamTransport::open_got(int peer, const FrameHeader& h) {
  Peer& from = peers_[peer];
  const auto get = from.gets.find(h.sequence);
  if (get == from.gets.end() || get->second.bytes != h.bytes || get->second.tag != h.tag)
    refuse(peer, h, "it answers a request that was not made");
  from.to = get->second.data;
}

// A message whose data follows, or which its receiver reads in place.
void StreamTransport::open_message(int peer, const FrameHeader& h) {
  Peer& from = peers_[peer];
  const bool in_memory = h.kind == FrameKind::placed;
  auto message = new_message(h);
  if (in_memory) message->place = in_place(peer, h.offset, h.total);
  if (h.sequence != from.announced) refuse(peer, h, "out of order");
  if (in_memory && !message->place) refuse(peer, h, "beyond its sender's memory");
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == h.tag; });
  const bool wanted = posted != from.posted.end();
  if (wanted) {
    check_match(peer, *message, posted->bytes, posted->mark);
    message->data = posted->data, message->request = posted->request;
    from.posted.erase(posted);
  } else {
    hold(peer, message);
  }
  from.announced++;
  if (!in_memory) from.message = std::move(message);
  else if (wanted) take(peer, *message);
}

StreamTransport::Window& StreamTransport::window_of(int peer, const FrameHeader& h) {
  const auto window = windows_.find(h.tag);
  if (window == windows_.end()) refuse(peer, h, "this rank did not expose such a window");
  const int64_t bytes = window->second.bytes;
  if (h.kind != FrameKind::notify && (h.offset > bytes || h.total > bytes - h.offset))
    refuse(peer, h, "bytes beyond the window's end");
  return window->second;
}

// Frames that break the table (stream_frames.cpp) are refused first.
void StreamTransport::open_frame(int peer) {
  Peer& from = peers_[peer];
  const FrameHeader& h = from.header;
  if (const char* const rule = broken_rule(h)) refuse(peer, h, rule);
  from.to = nullptr, from.room = h.bytes;
  switch (h.kind) {
    case FrameKind::message:
    case FrameKind::placed: open_message(peer, h); break;
    case FrameKind::put: from.to = window_of(peer, h).base + h.offset; break;
    case FrameKind::get:
      window_of(peer, h);
      if (from.answers >= kMaxGets) refuse(peer, h, "too many requests before their answers were read");
      break;
    case FrameKind::got: open_got(peer, h); break;
    case FrameKind::notify: window_of(peer, h); break;
    case FrameKind::goodbye:
      from.reason.resize(size_t(h.bytes));
      from.to = reinterpret_cast<uint8_t*>(from.reason.data());
      break;
    case FrameKind::taken: open_taken(peer, h); break;
  }
  if (from.message && h.bytes) place_data(from);
}

void StreamTransport::close_message(Peer& from) {
  const std::shared_ptr<Message> message = std::move(from.message);
  message->arrived = true;
  if (message->request) deliver(*message);
}

void StreamTransport::close_frame(int peer) {
  Peer& from = peers_[peer];
  const FrameHeader h = from.header;
  switch (h.kind) {
    case FrameKind::message: close_message(from); break;
    case FrameKind::notify: windows_[h.tag].notified[int(h.offset)]++; break;
    case FrameKind::get:
      from.answers++;
      push(peer, {kFrameMagic, FrameKind::got, {}, h.tag, 0, h.sequence, 0, h.total, h.total},
           windows_[h.tag].base + h.offset, 0);
      break;
    case FrameKind::got:
      finish(from.gets[h.sequence].request);
      from.gets.erase(h.sequence);
      break;
    case FrameKind::goodbye:
      from.goodbye = from.reason.empty() ? "no reason given" : printable(from.reason);
      cut_off(peer, "gave up");
    default: break;  // a put is already in place; other kinds were handled on arrival
  }
}

// After this, callers may reuse their memory: nothing more is read.
void StreamTransport::abandon(const char* reason) {
  if (gave_up_.empty()) gave_up_ = *reason ? reason : "this rank gave up";
  std::string text(reason, std::min<size_t>(std::strlen(reason), kMaxGoodbye));
  for (int peer = 0; peer < size; peer++) {
    if (peer == rank) continue;
    try {
      // The goodbye must follow a complete frame. A peer in the middle of a frame notices the end of the stream.
      while (peers_[peer].out.size() > 1) peers_[peer].out.pop_back();
      push(peer, {kFrameMagic, FrameKind::goodbye, {}, 0, 0, 0, 0, int64_t(text.size()), int64_t(text.size())}, nullptr,
           0, text);
      drain(peer);
    } catch (const Error&) {
      // The peer is gone, too.
    }
  }
}

}  // namespace ckdist
