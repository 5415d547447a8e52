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

StreamTransport::StreamTransport(int rank, int size, int lanes, double timeout_s)
    : Transport(rank, size, timeout_s), lanes_(lanes), pool_({0, size_t(KeptBytes::kPooled)}) {
  if (lanes < 1 || lanes > kMaxLanes)
    fail(Status::config, "%d connections between two ranks; use 1 to %d", lanes, kMaxLanes);
  for (int i = 0; i < size * lanes; i++) streams_.emplace_back(&pool_);
  for (int i = 0; i < size; i++) peers_.emplace_back(&pool_);
}

std::shared_ptr<StreamTransport::Message> StreamTransport::new_message(const FrameHeader& h) {
  auto message = std::allocate_shared<Message>(std::pmr::polymorphic_allocator<Message>(&pool_), &pool_);
  message->bytes = h.total, message->parts = h.parts, message->tag = h.tag, message->mark = h.mark;
  message->sequence = h.sequence;
  return message;
}

int64_t StreamTransport::Message::held() const {
  constexpr int64_t kOwn = 64;  // bytes of the pool and of the queue
  return kOwn + int64_t(sizeof(Message)) + (place ? 0 : bytes + parts * int64_t(sizeof(KeptBytes)));
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
  int lane = 0;
  while (&streams_[peer * lanes_ + lane].header != &h) lane++;
  if (rule == kNoFrame) cut_off(peer, "sent something that is not a frame (%s)", describe(h, lane).c_str());
  cut_off(peer, "sent a bad frame (%s): %s", describe(h, lane).c_str(), rule);
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
  if (!p.goodbye.empty() || p.lanes_ended || p.refused) lost(peer, p.end.c_str());
}

// A peer that has finished may leave. It is lost only for ranks that still wait for it.
void StreamTransport::ended(int peer, int lane, const char* how) {
  Stream& stream = streams_[peer * lanes_ + lane];
  if (!stream.ended) peers_[peer].lanes_ended++;
  stream.ended = true;
  if (!peers_[peer].refused) peers_[peer].end = how;
}

bool StreamTransport::awaited(int peer) const {
  const Peer& p = peers_[peer];
  if (!p.posted.empty() || !p.gets.empty() || !p.arriving.empty() || !p.lent.empty()) return true;
  for (int lane = 0; lane < lanes_; lane++)
    if (anything_to_write(peer, lane) || streams_[peer * lanes_ + lane].message) return true;
  return false;
}

uint32_t StreamTransport::begin(int parts) {
  if (idle_operations_.empty()) operations_.emplace_back(), idle_operations_.push_back(uint32_t(operations_.size()));
  const uint32_t request = idle_operations_.back();
  idle_operations_.pop_back();
  Operation& o = operations_[request - 1];
  o.left = parts, o.used = true;
  return request;
}

void StreamTransport::finish(uint32_t request) {
  if (request) operations_[request - 1].left--;
}

Transport::Request StreamTransport::ticket(uint32_t request) const {
  return Request(operations_[request - 1].generation) << 32 | request;
}

void StreamTransport::push(int peer, int lane, const FrameHeader& header, const void* data, uint32_t request,
                           std::string kept) {
  Stream& stream = streams_[peer * lanes_ + lane];
  stream.out.push_back({header, 0, static_cast<const uint8_t*>(data), request, std::move(kept)});
  if (!stream.out.back().kept.empty())
    stream.out.back().data = reinterpret_cast<const uint8_t*>(stream.out.back().kept.data());
  if (stream.out.size() == 1) drain(peer, lane);
}

Transport::Request StreamTransport::isend(int peer, int tag, const void* data, int64_t bytes) {
  check_peer(peer);
  if (bytes < 0 || bytes > kMaxMessage)
    fail(Status::config, "a message of %lld bytes; at most %lld can be sent", (long long)bytes, (long long)kMaxMessage);
  if (const int64_t place = bytes >= kPlaceAt ? placed(data, bytes) : -1; place >= 0) {
    const uint32_t request = begin(1);
    const uint64_t sequence = peers_[peer].sent++;
    peers_[peer].lent[sequence] = request;
    push(peer, 0, {kFrameMagic, FrameKind::placed, 1, {}, tag, mark, sequence, place, 0, bytes}, nullptr, 0);
    return ticket(request);
  }
  const int parts = parts_of(bytes, lanes_);
  const uint32_t request = begin(parts);
  const Request result = ticket(request);
  const uint64_t sequence = peers_[peer].sent++;
  for (int lane = 0; lane < parts; lane++) {
    const int64_t first = first_of(bytes, lane, parts), last = first_of(bytes, lane + 1, parts);
    const FrameKind kind = lane ? FrameKind::part : FrameKind::message;
    push(peer, lane, {kFrameMagic, kind, uint8_t(parts), {}, tag, mark, sequence, first, last - first, bytes},
         static_cast<const uint8_t*>(data) + first, request);
  }
  return result;
}

Transport::Request StreamTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  if (peer < 0 || peer >= size || peer == rank) check_peer(peer);
  Peer& from = peers_[peer];
  const auto early =
      std::find_if(from.unexpected.begin(), from.unexpected.end(), [&](const auto& m) { return m->tag == tag; });
  if (early == from.unexpected.end()) {
    check_peer(peer);
    const uint32_t request = begin(1);
    from.posted.push_back({tag, static_cast<uint8_t*>(data), bytes, request, mark});
    return ticket(request);
  }
  const std::shared_ptr<Message> message = *early;
  check_match(peer, *message, bytes, mark);
  from.unexpected.erase(early);
  unexpected_bytes_ -= message->held();
  const uint32_t request = begin(1);
  const Request result = ticket(request);
  message->request = request, message->data = static_cast<uint8_t*>(data);
  if (message->place) take(peer, *message, data);
  else if (message->complete()) deliver(*message), finish(request);
  return result;
}

void StreamTransport::check_match(int peer, const Message& message, int64_t bytes, uint32_t mark) {
  if (message.bytes != bytes)
    cut_off(peer, "sent %lld bytes where %lld were expected", (long long)message.bytes, (long long)bytes);
  if (message.mark != mark)
    cut_off(peer,
            "called another collective, or another dtype or operation, than this rank: all ranks must make the same "
            "calls in the same order");
}

void StreamTransport::hold(int peer, const std::shared_ptr<Message>& message) {
  if (unexpected_bytes_ + message->held() > kMaxUnexpected)
    cut_off(peer, "sent %lld bytes that nobody receives, to %lld of others; at most %lld are held",
            (long long)message->held(), (long long)unexpected_bytes_, (long long)kMaxUnexpected);
  unexpected_bytes_ += message->held();
  peers_[peer].unexpected.push_back(message);
}

void StreamTransport::deliver(const Message& message) {
  for (size_t part = 0; part < message.kept.size(); part++) {
    const int64_t first = first_of(message.bytes, int(part), message.parts),
                  last = first_of(message.bytes, int(part) + 1, message.parts);
    // This part has no kept data if the receive was already posted.
    if (message.kept[part].data()) std::memcpy(message.data + first, message.kept[part].data(), size_t(last - first));
  }
}

void StreamTransport::take(int peer, const Message& message, void* to) {
  std::memcpy(to, message.place, size_t(message.bytes));
  add_moved(message.bytes);
  finish(message.request);
  push(peer, 0, {kFrameMagic, FrameKind::taken, 1, {}, 0, 0, message.sequence, 0, 0, 0}, nullptr, 0);
}

void StreamTransport::expose(int window, void* base, int64_t bytes) {
  Window& w = windows_[window];
  w.base = static_cast<uint8_t*>(base), w.bytes = bytes;
}

Transport::Request StreamTransport::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  check_peer(peer);
  const uint32_t request = begin(1);
  const Request result = ticket(request);
  push(peer, 0, {kFrameMagic, FrameKind::put, 1, {}, window, 0, 0, offset, bytes, bytes}, data, request);
  return result;
}

Transport::Request StreamTransport::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  check_peer(peer);
  if (peers_[peer].gets.size() >= kMaxGets)
    fail(Status::config, "%d gets of rank %d are under way; wait for some before the next", kMaxGets, name_of(peer));
  const uint32_t request = begin(1);
  const uint64_t number = ++get_count_;
  peers_[peer].gets[number] = {window, static_cast<uint8_t*>(data), bytes, request, 0};
  push(peer, 0, {kFrameMagic, FrameKind::get, 1, {}, window, 0, number, offset, 0, bytes}, nullptr, 0);
  return ticket(request);
}

Transport::Request StreamTransport::inotify(int peer, int window, int slot) {
  check_peer(peer);
  check_slot(slot);
  const uint32_t request = begin(1);
  const Request result = ticket(request);
  push(peer, 0, {kFrameMagic, FrameKind::notify, 1, {}, window, 0, 0, slot, 0, 0}, nullptr, request);
  return result;
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
  if (operations_[index - 1].left > 0) progress();
  Operation& o = operations_[index - 1];
  if (o.left > 0) return false;
  o.used = false;
  if (++o.generation == 0) o.generation = 1;
  idle_operations_.push_back(index);
  return true;
}

void StreamTransport::progress() {
  if (!gave_up_.empty()) fail(Status::comm, "%s", gave_up_.c_str());
  look();
  for (int k = 1; k < size; k++) {
    const int peer = (rank + k) % size;
    for (int lane = 0; lane < lanes_; lane++) {
      drain(peer, lane);
      while (fill(peer, lane)) {}
    }
    const Peer& p = peers_[peer];
    if ((p.lanes_ended == lanes_ || p.refused) && awaited(peer)) lost(peer, p.end.c_str());
  }
}

// Writes until the stream is full. Returns true if all is written.
bool StreamTransport::drain(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  constexpr int64_t kHeader = sizeof(FrameHeader);
  while (!stream.ended && !stream.out.empty()) {
    Outgoing& o = stream.out.front();
    while (o.sent < kHeader + o.header.bytes) {
      const bool head = o.sent < kHeader;
      const void* from = head ? reinterpret_cast<const uint8_t*>(&o.header) + o.sent : o.data + (o.sent - kHeader);
      const int64_t n = write(peer, lane, from, head ? kHeader - o.sent : o.header.bytes - (o.sent - kHeader));
      if (n == 0) return false;
      o.sent += n;
      add_moved(n);
    }
    finish(o.request);
    peers_[peer].answers -= o.header.kind == FrameKind::got;
    stream.out.pop_front();
  }
  return true;
}

// Reads available data. Returns true if a frame is complete and more may follow.
bool StreamTransport::fill(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  if (stream.ended || peers_[peer].refused) return false;
  if (!stream.in_data) {
    while (stream.got < int64_t(sizeof(FrameHeader))) {
      const int64_t n = read(peer, lane, reinterpret_cast<uint8_t*>(&stream.header) + stream.got,
                             int64_t(sizeof(FrameHeader)) - stream.got);
      if (n == 0) return false;
      stream.got += n;
      add_moved(n);
    }
    if (!open_frame(peer, lane)) return false;
    stream.in_data = true, stream.got = 0;
  }
  const int64_t bytes = stream.header.bytes;
  while (stream.got < bytes) {
    if (stream.got == stream.room) place_data(lane, stream);
    const int64_t n = read(peer, lane, stream.to + stream.got, stream.room - stream.got);
    if (n == 0) return false;
    stream.got += n;
    add_moved(n);
  }
  stream.in_data = false, stream.got = 0;
  close_frame(peer, lane);
  return true;
}

// Sets the destination of the next data of a message: the receiver's buffer, or else memory that grows.
void StreamTransport::place_data(int lane, Stream& stream) {
  const FrameHeader& h = stream.header;
  Message& message = *stream.message;
  const bool begun = !message.kept.empty() && message.kept[lane].data();
  if (message.request && !begun) {
    stream.to = message.data + h.offset;
    stream.room = h.bytes;
    return;
  }
  message.kept[lane].grow(h.bytes);
  stream.to = message.kept[lane].data();
  stream.room = std::min(message.kept[lane].room(), h.bytes);
}

// A message that its receiver reads in place.
void StreamTransport::open_placed(int peer, const FrameHeader& h) {
  Peer& from = peers_[peer];
  auto message = new_message(h);
  message->place = in_place(peer, h.offset, h.total);
  if (h.sequence != from.announced) refuse(peer, h, "out of order");
  if (!message->place) refuse(peer, h, "beyond its sender's memory");
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == h.tag; });
  if (posted == from.posted.end()) {
    hold(peer, message);
    from.announced++;
    return;
  }
  const Posted here = *posted;
  check_match(peer, *message, here.bytes, here.mark);
  from.announced++;
  from.posted.erase(posted);
  message->request = here.request;
  take(peer, *message, here.data);
}

// The receiver has copied a placed message.
void StreamTransport::open_taken(int peer, const FrameHeader& h) {
  Peer& from = peers_[peer];
  const auto lent = from.lent.find(h.sequence);
  if (lent == from.lent.end()) refuse(peer, h, "no such message was sent");
  finish(lent->second);
  from.lent.erase(lent);
}

void StreamTransport::open_got(int peer, Stream& stream) {
  const FrameHeader& h = stream.header;
  const auto get = peers_[peer].gets.find(h.sequence);
  if (get == peers_[peer].gets.end() || get->second.bytes != h.bytes || get->second.tag != h.tag)
    refuse(peer, h, "it answers a request that was not made");
  stream.to = get->second.data;
}

void StreamTransport::announce(int peer, Stream& stream) {
  const FrameHeader& h = stream.header;
  Peer& from = peers_[peer];
  if (h.sequence != from.announced) refuse(peer, h, "out of order");
  auto message = new_message(h);
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == h.tag; });
  if (posted != from.posted.end()) {
    check_match(peer, *message, posted->bytes, posted->mark);
    message->data = posted->data, message->request = posted->request;
    from.posted.erase(posted);
  } else {
    hold(peer, message);
    for (int part = 0; part < h.parts; part++) message->kept.emplace_back(&pool_);
  }
  from.announced++;
  if (h.parts > 1) from.arriving[h.sequence] = message;
  stream.message = std::move(message);
}

bool StreamTransport::open_part(int peer, int lane, Stream& stream) {
  const FrameHeader& h = stream.header;
  Peer& from = peers_[peer];
  if (h.sequence >= from.announced) return false;
  const auto at = from.arriving.find(h.sequence);
  if (at == from.arriving.end() || at->second->arrived >> lane & 1) refuse(peer, h, "it came already");
  const Message& message = *at->second;
  if (h.total != message.bytes || h.tag != message.tag || h.mark != message.mark)
    refuse(peer, h, "it does not fit the message that it is a part of");
  stream.message = at->second;
  return true;
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
bool StreamTransport::open_frame(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  const FrameHeader& h = stream.header;
  if (const char* const rule = broken_rule(h, lane, lanes_)) refuse(peer, h, rule);
  stream.to = nullptr, stream.room = h.bytes;
  switch (h.kind) {
    case FrameKind::message: announce(peer, stream); break;
    case FrameKind::part:
      if (!open_part(peer, lane, stream)) return false;
      break;
    case FrameKind::put: stream.to = window_of(peer, h).base + h.offset; break;
    case FrameKind::get:
      window_of(peer, h);
      if (peers_[peer].answers >= kMaxGets) refuse(peer, h, "too many requests before their answers were read");
      break;
    case FrameKind::got: open_got(peer, stream); break;
    case FrameKind::notify: window_of(peer, h); break;
    case FrameKind::goodbye:
      stream.goodbye.resize(size_t(h.bytes));
      stream.to = reinterpret_cast<uint8_t*>(stream.goodbye.data());
      break;
    case FrameKind::placed: open_placed(peer, h); break;
    case FrameKind::taken: open_taken(peer, h); break;
  }
  if (stream.message && h.bytes) place_data(lane, stream);
  return true;
}

void StreamTransport::close_message(int peer, int lane, Stream& stream) {
  const std::shared_ptr<Message> message = std::move(stream.message);
  message->arrived |= 1u << lane;
  if (!message->complete()) return;
  if (message->parts > 1) peers_[peer].arriving.erase(message->sequence);
  if (!message->request) return;  // no receive is posted yet
  deliver(*message);
  finish(message->request);
}

void StreamTransport::close_frame(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  const FrameHeader h = stream.header;
  Peer& from = peers_[peer];
  switch (h.kind) {
    case FrameKind::message:
    case FrameKind::part: close_message(peer, lane, stream); break;
    case FrameKind::notify: windows_[h.tag].notified[int(h.offset)]++; break;
    case FrameKind::get:
      from.answers++;
      push(peer, 0, {kFrameMagic, FrameKind::got, 1, {}, h.tag, 0, h.sequence, 0, h.total, h.total},
           windows_[h.tag].base + h.offset, 0);
      break;
    case FrameKind::got:
      finish(from.gets[h.sequence].request);
      from.gets.erase(h.sequence);
      break;
    case FrameKind::goodbye:
      for (char& c : stream.goodbye)
        if (c < ' ' || c > '~') c = '?';
      from.goodbye = stream.goodbye.empty() ? "no reason given" : stream.goodbye;
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
      Stream& stream = streams_[peer * lanes_];
      // The goodbye must follow a complete frame. A peer in the middle of a frame notices the end of the stream.
      while (stream.out.size() > 1) stream.out.pop_back();
      push(peer, 0, {kFrameMagic, FrameKind::goodbye, 1, {}, 0, 0, 0, 0, int64_t(text.size()), int64_t(text.size())},
           nullptr, 0, text);
      drain(peer, 0);
    } catch (const Error&) {
      // The peer is gone, too.
    }
  }
}

}  // namespace ckdist
