#include "comm/transports/stream_transport.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr uint32_t kMagic = 0x31446b63;
constexpr int64_t kSplitAt = 512 << 10;  // messages this long use all lanes
constexpr int64_t kPlaceAt = 32 << 10;   // messages this long are read in place, where that is possible
constexpr int64_t kMaxMessage = int64_t(1) << 40;
constexpr int64_t kMaxUnexpected = int64_t(2) << 30;  // bytes held for receives that are not posted yet
constexpr int64_t kMaxGoodbye = 400;
constexpr size_t kPooledBytes = 64 << 10;  // larger data that nobody receives yet is allocated, and freed
}  // namespace

StreamTransport::StreamTransport(int rank, int size, int lanes, double timeout_s)
    : Transport(rank, size, timeout_s), lanes_(lanes), pool_({0, kPooledBytes}) {
  for (int i = 0; i < size * lanes; i++) streams_.emplace_back(&pool_);
  for (int i = 0; i < size; i++) peers_.emplace_back(&pool_);
}

std::shared_ptr<StreamTransport::Message> StreamTransport::new_message() {
  return std::allocate_shared<Message>(std::pmr::polymorphic_allocator<Message>(&pool_), &pool_);
}

void StreamTransport::lost(int peer, const char* how) const {
  const std::string& reason = peers_[peer].goodbye;
  if (!reason.empty()) fail(Status::comm, "%s gave up: %s", who(name_of(peer)).c_str(), reason.c_str());
  fail(Status::comm, "%s %s", who(name_of(peer)).c_str(), how);
}

void StreamTransport::check_peer(int peer) const {
  if (peer < 0 || peer >= size || peer == rank)
    fail(Status::config, "rank %d cannot be reached from rank %d of %d", peer, rank, size);
  if (!peers_[peer].goodbye.empty() || peers_[peer].lanes_ended) lost(peer, peers_[peer].end.c_str());
}

// A peer that is done may leave; it is lost only to those who still wait for it.
void StreamTransport::ended(int peer, int lane, const char* how) {
  Stream& stream = streams_[peer * lanes_ + lane];
  if (!stream.ended) peers_[peer].lanes_ended++;
  stream.ended = true;
  peers_[peer].end = how;
}

bool StreamTransport::awaited(int peer) const {
  const Peer& p = peers_[peer];
  if (!p.posted.empty() || !p.gets.empty() || !p.arriving.empty() || !p.lent.empty()) return true;
  for (int lane = 0; lane < lanes_; lane++)
    if (anything_to_write(peer, lane)) return true;
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

void StreamTransport::push(int peer, int lane, const Header& header, const void* data, uint32_t request,
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
    push(peer, 0, {kMagic, kPlaced, 1, {}, tag, mark, sequence, place, 0, bytes}, nullptr, 0);
    return ticket(request);
  }
  const int parts = bytes >= kSplitAt ? lanes_ : 1;
  const uint32_t request = begin(parts);
  const Request result = ticket(request);
  const uint64_t sequence = peers_[peer].sent++;
  for (int lane = 0; lane < parts; lane++) {
    const int64_t first = bytes * lane / parts, last = bytes * (lane + 1) / parts;
    push(
        peer, lane,
        {kMagic, uint8_t(lane ? kPart : kMessage), uint8_t(parts), {}, tag, mark, sequence, first, last - first, bytes},
        static_cast<const uint8_t*>(data) + first, request);
  }
  return result;
}

Transport::Request StreamTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  if (peer < 0 || peer >= size || peer == rank) check_peer(peer);
  Peer& from = peers_[peer];
  const auto early =
      std::find_if(from.unexpected.begin(), from.unexpected.end(), [&](const auto& m) { return m->tag == tag; });
  if (early == from.unexpected.end()) check_peer(peer);
  const uint32_t request = begin(1);
  if (early == from.unexpected.end()) {
    from.posted.push_back({tag, static_cast<uint8_t*>(data), bytes, request, mark});
    return ticket(request);
  }
  const std::shared_ptr<Message> message = *early;
  from.unexpected.erase(early);
  check_match(peer, *message, bytes, mark);
  message->request = request;
  if (message->place) {
    take(peer, *message, data);
    return ticket(request);
  }
  unexpected_bytes_ -= bytes;
  if (message->left == 0) {
    if (bytes) std::memcpy(data, message->kept.data(), size_t(bytes));
    finish(request);
  } else {
    message->data = static_cast<uint8_t*>(data);  // copied there once complete
  }
  return ticket(request);
}

void StreamTransport::check_match(int peer, const Message& message, int64_t bytes, uint32_t mark) const {
  if (message.bytes != bytes)
    fail(Status::comm, "rank %d sent %lld bytes where %lld were expected", name_of(peer), (long long)message.bytes,
         (long long)bytes);
  if (message.mark != mark)
    fail(Status::comm,
         "rank %d called another collective, or another dtype or operation, than this rank: all ranks must make the "
         "same calls in the same order",
         name_of(peer));
}

void StreamTransport::complete(const std::shared_ptr<Message>& message) {
  if (!message->request) return;  // no receive was posted yet
  if (!message->kept.empty()) std::memcpy(message->data, message->kept.data(), message->kept.size());
  finish(message->request);
}

void StreamTransport::take(int peer, const Message& message, void* to) {
  std::memcpy(to, message.place, size_t(message.bytes));
  add_moved(message.bytes);
  finish(message.request);
  push(peer, 0, {kMagic, kTaken, 1, {}, 0, 0, message.sequence, 0, 0, 0}, nullptr, 0);
}

void StreamTransport::expose(int window, void* base, int64_t bytes) {
  Window& w = windows_[window];
  w.base = static_cast<uint8_t*>(base), w.bytes = bytes;
}

Transport::Request StreamTransport::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  check_peer(peer);
  const uint32_t request = begin(1);
  const Request result = ticket(request);
  push(peer, 0, {kMagic, kPut, 1, {}, window, 0, 0, offset, bytes, bytes}, data, request);
  return result;
}

Transport::Request StreamTransport::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  check_peer(peer);
  const uint32_t request = begin(1);
  const uint64_t number = ++get_count_;
  peers_[peer].gets[number] = {window, static_cast<uint8_t*>(data), bytes, request, 0};
  push(peer, 0, {kMagic, kGet, 1, {}, window, 0, number, offset, 0, bytes}, nullptr, 0);
  return ticket(request);
}

Transport::Request StreamTransport::inotify(int peer, int window, int slot) {
  check_peer(peer);
  const uint32_t request = begin(1);
  const Request result = ticket(request);
  push(peer, 0, {kMagic, kNotify, 1, {}, window, 0, 0, slot, 0, 0}, nullptr, request);
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
  look();
  for (int k = 1; k < size; k++) {
    const int peer = (rank + k) % size;
    for (int lane = 0; lane < lanes_; lane++) {
      drain(peer, lane);
      while (fill(peer, lane)) {}
    }
    if (peers_[peer].lanes_ended == lanes_ && awaited(peer)) lost(peer, peers_[peer].end.c_str());
  }
}

// Writes what it can; true when all is gone.
bool StreamTransport::drain(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  constexpr int64_t kHeader = sizeof(Header);
  while (!stream.ended && !stream.out.empty()) {
    Outgoing& o = stream.out.front();
    while (o.sent < kHeader + (o.header.kind == kGet ? 0 : o.header.bytes)) {
      const bool head = o.sent < kHeader;
      const void* from = head ? reinterpret_cast<const uint8_t*>(&o.header) + o.sent : o.data + (o.sent - kHeader);
      const int64_t n = write(peer, lane, from, head ? kHeader - o.sent : o.header.bytes - (o.sent - kHeader));
      if (n == 0) return false;
      o.sent += n;
      add_moved(n);
    }
    finish(o.request);
    stream.out.pop_front();
  }
  return true;
}

// Reads what is there; true when a frame was finished and more may follow.
bool StreamTransport::fill(int peer, int lane) {
  Stream& stream = streams_[peer * lanes_ + lane];
  if (stream.ended) return false;
  if (!stream.in_data) {
    while (stream.got < int64_t(sizeof(Header))) {
      const int64_t n = read(peer, lane, reinterpret_cast<uint8_t*>(&stream.header) + stream.got,
                             int64_t(sizeof(Header)) - stream.got);
      if (n == 0) return false;
      stream.got += n;
      add_moved(n);
    }
    if (!open_frame(peer, stream)) return false;
    stream.in_data = true, stream.got = 0;
  }
  const int64_t bytes = stream.header.kind == kGet ? 0 : stream.header.bytes;
  while (stream.got < bytes) {
    const int64_t n = read(peer, lane, stream.to + stream.got, bytes - stream.got);
    if (n == 0) return false;
    stream.got += n;
    add_moved(n);
  }
  stream.in_data = false, stream.got = 0;
  close_frame(peer, stream);
  return true;
}

// A message that its receiver reads where it lies.
void StreamTransport::open_placed(int peer, const Header& h) {
  Peer& from = peers_[peer];
  auto message = new_message();
  message->bytes = h.total, message->tag = h.tag, message->mark = h.mark, message->sequence = h.sequence;
  message->place = in_place(peer, h.offset, h.total);
  if (h.sequence != from.announced || h.bytes || !message->place)
    lost(peer, "sent a message out of order or out of reach");
  from.announced++;
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == h.tag; });
  if (posted == from.posted.end()) {
    from.unexpected.push_back(std::move(message));
    return;
  }
  const Posted here = *posted;
  from.posted.erase(posted);
  check_match(peer, *message, here.bytes, here.mark);
  message->request = here.request;
  take(peer, *message, here.data);
}

// The receiver has read it.
void StreamTransport::open_taken(int peer, const Header& h) {
  Peer& from = peers_[peer];
  const auto lent = from.lent.find(h.sequence);
  if (lent == from.lent.end() || h.bytes) lost(peer, "took what was not sent");
  finish(lent->second);
  from.lent.erase(lent);
}

void StreamTransport::announce(int peer, const Header& h) {
  Peer& from = peers_[peer];
  if (h.sequence != from.announced || h.offset != 0 || h.parts < 1 || h.parts > lanes_)
    lost(peer, "sent a message out of order");
  from.announced++;
  auto message = new_message();
  message->bytes = h.total, message->left = h.parts, message->tag = h.tag, message->mark = h.mark;
  const auto posted =
      std::find_if(from.posted.begin(), from.posted.end(), [&](const Posted& p) { return p.tag == h.tag; });
  if (posted != from.posted.end()) {
    check_match(peer, *message, posted->bytes, posted->mark);
    message->data = posted->data, message->request = posted->request;
    from.posted.erase(posted);
  } else {
    unexpected_bytes_ += h.total;
    if (unexpected_bytes_ > kMaxUnexpected)
      fail(Status::comm, "%lld bytes arrived that nobody receives, the last from rank %d; at most %lld are held",
           (long long)unexpected_bytes_, name_of(peer), (long long)kMaxUnexpected);
    message->kept.resize(size_t(h.total));
    from.unexpected.push_back(message);
  }
  from.arriving[h.sequence] = std::move(message);
}

bool StreamTransport::open_part(int peer, Stream& stream) {
  const Header& h = stream.header;
  Peer& from = peers_[peer];
  const auto at = from.arriving.find(h.sequence);
  if (at == from.arriving.end()) {
    if (h.sequence < from.announced) lost(peer, "sent a part of a message twice");
    return false;
  }
  Message& message = *at->second;
  if (h.total != message.bytes) lost(peer, "sent parts of a message that do not fit");
  stream.to = (message.kept.empty() ? message.data : message.kept.data()) + h.offset;
  return true;
}

bool StreamTransport::open_frame(int peer, Stream& stream) {
  const Header& h = stream.header;
  Peer& from = peers_[peer];
  const bool sane = h.magic == kMagic && h.bytes >= 0 && h.offset >= 0 && h.total >= 0 && h.total <= kMaxMessage &&
                    h.bytes <= h.total - (h.kind <= kPart ? h.offset : 0);
  if (!sane) lost(peer, "sent something that is not a frame");
  if (h.kind == kPlaced) return open_placed(peer, h), true;
  if (h.kind == kTaken) return open_taken(peer, h), true;
  if (h.kind == kMessage) announce(peer, h);
  if (h.kind <= kPart) return open_part(peer, stream);
  if (h.kind == kPut || h.kind == kGet || h.kind == kNotify) {
    const auto window = windows_.find(h.tag);
    if (window == windows_.end()) lost(peer, "addressed a window that this rank did not expose");
    const int64_t last = h.kind == kNotify ? 0 : window->second.bytes;
    if (h.kind != kNotify && (h.offset > last || h.total > last - h.offset))
      lost(peer, "addressed bytes beyond a window's end");
    stream.to = window->second.base + (h.kind == kPut ? h.offset : 0);
    return true;
  }
  if (h.kind == kGot) {
    const auto get = from.gets.find(h.sequence);
    if (get == from.gets.end() || get->second.bytes != h.bytes) lost(peer, "answered a request that was not made");
    stream.to = get->second.data;
    return true;
  }
  if (h.kind == kGoodbye && h.bytes <= kMaxGoodbye) {
    stream.goodbye.resize(size_t(h.bytes));
    stream.to = reinterpret_cast<uint8_t*>(stream.goodbye.data());
    return true;
  }
  lost(peer, "sent something that is not a frame");
}

void StreamTransport::close_frame(int peer, Stream& stream) {
  const Header h = stream.header;
  Peer& from = peers_[peer];
  if (h.kind <= kPart) {
    const std::shared_ptr<Message> message = from.arriving[h.sequence];
    if (--message->left == 0) from.arriving.erase(h.sequence), complete(message);
  } else if (h.kind == kNotify) {
    windows_[h.tag].notified[int(h.offset)]++;
  } else if (h.kind == kGet) {
    push(peer, 0, {kMagic, kGot, 1, {}, h.tag, 0, h.sequence, 0, h.total, h.total}, windows_[h.tag].base + h.offset, 0);
  } else if (h.kind == kGot) {
    finish(from.gets[h.sequence].request);
    from.gets.erase(h.sequence);
  } else if (h.kind == kGoodbye) {
    for (char& c : stream.goodbye)
      if (c < ' ' || c > '~') c = '?';
    from.goodbye = stream.goodbye.empty() ? "no reason given" : stream.goodbye;
    lost(peer, "");
  }
}

void StreamTransport::abandon(const char* reason) {
  std::string text(reason, std::min<size_t>(std::strlen(reason), kMaxGoodbye));
  for (int peer = 0; peer < size; peer++) {
    if (peer == rank) continue;
    try {
      Stream& stream = streams_[peer * lanes_];
      // Only a frame's border can carry it; a peer in the middle of one notices the end of the stream.
      while (stream.out.size() > 1) stream.out.pop_back();
      push(peer, 0, {kMagic, kGoodbye, 1, {}, 0, 0, 0, 0, int64_t(text.size()), int64_t(text.size())}, nullptr, 0,
           text);
      drain(peer, 0);
    } catch (const Error&) {
      // That peer is gone itself.
    }
  }
}

}  // namespace ckdist
