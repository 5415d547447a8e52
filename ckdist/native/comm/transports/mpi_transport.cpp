#include "comm/transports/mpi_transport.h"

#include <time.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kMost = 1 << 20;  // bytes in one message to MPI
constexpr size_t kUnderWay = 4;     // number of such messages in flight
constexpr int kCounted = 4096;      // messages of at least this size count as progress
// Less than the tags of channels, which begin at 8.
constexpr int kAskTag = 1, kPutTag = 2, kGotTag = 3, kHeartbeatTag = 4;
}  // namespace

void MpiTransport::post(Part& part) {
  if (calls_.isend(part.data, part.bytes, calls_.byte, part.peer, part.tag, calls_.comm, part.handle))
    fail(Status::comm, "MPI refused to send %d bytes to rank %d", part.bytes, part.peer);
}

void MpiTransport::send(Operation& operation, int peer, int tag, const void* data, int64_t bytes) {
  Queue& queue = queues_.try_emplace({peer, tag}, &pool_).first->second;
  for (int64_t at = 0; at == 0 || at < bytes; at += kMost) {
    operation.parts.push_back({{},
                               peer,
                               false,
                               false,
                               int(std::min(kMost, bytes - at)),
                               tag,
                               static_cast<const uint8_t*>(data) + at,
                               nullptr});
    queue.waiting.push_back(&operation.parts.back());
  }
  pump(queue);
}

// Passes the next parts to MPI as others complete.
void MpiTransport::pump(Queue& queue) {
  auto& busy = queue.under_way;
  busy.erase(std::remove_if(busy.begin(), busy.end(), [&](Part* p) { return done(*p); }), busy.end());
  while (!queue.waiting.empty() && busy.size() < kUnderWay) {
    Part* const next = queue.waiting.front();
    queue.waiting.pop_front();
    post(*next);
    busy.push_back(next);
  }
}

void MpiTransport::receive(Operation& operation, int peer, int tag, void* data, int64_t bytes) {
  for (int64_t at = 0; at == 0 || at < bytes; at += kMost) {
    operation.parts.push_back({{}, peer, false, true, int(std::min(kMost, bytes - at)), tag, nullptr, nullptr});
    if (calls_.irecv(static_cast<uint8_t*>(data) + at, operation.parts.back().bytes, calls_.byte, peer, tag,
                     calls_.comm, operation.parts.back().handle))
      fail(Status::comm, "MPI refused to receive %lld bytes from rank %d", (long long)bytes, peer);
  }
}

bool MpiTransport::done(Part& part) {
  if (part.done) return true;
  alignas(16) uint8_t status[256];  // larger than any implementation's MPI_Status
  int flag = 0, came = part.bytes;
  if (calls_.test(part.handle, &flag, status))
    fail(Status::comm,
         "MPI reports that a message of %s failed: it is lost, or sent more than the %d bytes that were expected",
         who(part.peer).c_str(), part.bytes);
  if (!flag) return false;
  part.done = true;
  if (part.incoming && calls_.get_count(status, calls_.byte, &came) == 0 && part.head)
    take_head(part.peer, *part.head, came);
  else if (came != part.bytes)
    fail(Status::comm, "rank %d sent %d bytes where %d were expected", part.peer, came, part.bytes);
  if (came >= kCounted) add_moved(came);
  return true;
}

bool MpiTransport::done(Operation& operation) {
  bool all = true;
  for (Part& part : operation.parts) all &= part.incoming ? done(part) : part.done;
  return all;
}

void MpiTransport::take_head(int peer, const Head& head, int came) {
  const int64_t some = std::min(head.wanted_bytes, kWithHead);
  if (came < kHeadBytes) fail(Status::comm, "rank %d sent %d bytes that are no message of a collective", peer, came);
  const std::string wrong = mismatch(head.bytes, head.mark, head.wanted_bytes, head.wanted_mark);
  if (!wrong.empty()) fail(Status::comm, "%s %s", who(peer).c_str(), wrong.c_str());
  if (came != kHeadBytes + some)
    fail(Status::comm, "rank %d sent %d bytes where %lld were expected", peer, came, (long long)(kHeadBytes + some));
  if (some) std::memcpy(head.to, head.data, size_t(some));
}

Transport::Request MpiTransport::isend(int peer, int tag, const void* data, int64_t bytes) {
  Operation& operation = operations_.try_emplace(++last_, &pool_).first->second;
  if (!mark) {
    send(operation, peer, tag, data, bytes);
    return last_;
  }
  const int64_t some = std::min(bytes, kWithHead);
  operation.head.emplace();
  operation.head->mark = mark, operation.head->pad = 0, operation.head->bytes = bytes;
  if (some) std::memcpy(operation.head->data, data, size_t(some));
  send(operation, peer, tag, &*operation.head, kHeadBytes + some);
  if (bytes > some) send(operation, peer, tag, static_cast<const uint8_t*>(data) + some, bytes - some);
  return last_;
}

Transport::Request MpiTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  Operation& operation = operations_.try_emplace(++last_, &pool_).first->second;
  if (!mark) {
    receive(operation, peer, tag, data, bytes);
    return last_;
  }
  const int64_t some = std::min(bytes, kWithHead);
  operation.head.emplace();
  operation.head->wanted_mark = mark, operation.head->wanted_bytes = bytes,
  operation.head->to = static_cast<uint8_t*>(data);
  receive(operation, peer, tag, &*operation.head,
          kHeadBytes + kWithHead);  // room for any message: a wrong one is reported, not truncated
  operation.parts.back().head = &*operation.head;
  if (bytes > some) receive(operation, peer, tag, static_cast<uint8_t*>(data) + some, bytes - some);
  return last_;
}

void MpiTransport::expose(int window, void* base, int64_t bytes) {
  windows_[window] = {static_cast<uint8_t*>(base), bytes, {}};
}

Transport::Request MpiTransport::ask(int peer, const Ask& ask, Operation** out) {
  Operation& operation = operations_.try_emplace(++last_, &pool_).first->second;
  operation.ask = ask;
  send(operation, peer, kAskTag, &operation.ask, sizeof operation.ask);
  *out = &operation;
  return last_;
}

Transport::Request MpiTransport::iput(int peer, int window, int64_t offset, const void* data, int64_t bytes) {
  Operation* operation;
  const Request request = ask(peer, {kPut, window, offset, bytes}, &operation);
  send(*operation, peer, kPutTag, data, bytes);
  return request;
}

Transport::Request MpiTransport::iget(int peer, int window, int64_t offset, void* data, int64_t bytes) {
  Operation* operation;
  const Request request = ask(peer, {kGet, window, offset, bytes}, &operation);
  receive(*operation, peer, kGotTag, data, bytes);
  return request;
}

Transport::Request MpiTransport::inotify(int peer, int window, int slot) {
  check_slot(slot);
  Operation* operation;
  return ask(peer, {kNotify, window, slot, 0}, &operation);
}

uint64_t MpiTransport::notified(int window, int slot) {
  serve();
  return windows_[window].notified[slot];
}

// The window for a peer's operation. Checks that it allows the operation.
MpiTransport::Window& MpiTransport::window_of(int peer, const Ask& a) {
  const auto found = a.window < 0 || a.window > INT_MAX ? windows_.end() : windows_.find(int(a.window));
  const char* rule = nullptr;
  if (a.kind < kPut || a.kind > kNotify) rule = "no such kind";
  else if (found == windows_.end()) rule = "this rank did not expose such a window";
  else if (a.kind == kNotify && (a.bytes || a.offset < 0 || a.offset >= kWindowSlots)) rule = "no slot of a window";
  else if (a.kind != kNotify &&
           (a.offset < 0 || a.bytes < 0 || a.offset > found->second.bytes || a.bytes > found->second.bytes - a.offset))
    rule = "bytes beyond the window's end";
  if (rule)
    fail(Status::comm, "%s asked for something impossible (kind %lld, window %lld, offset %lld, %lld bytes): %s",
         who(peer).c_str(), (long long)a.kind, (long long)a.window, (long long)a.offset, (long long)a.bytes, rule);
  return found->second;
}

void MpiTransport::serve() {
  if (windows_.empty()) return;
  alignas(16) uint8_t status[256];
  for (int peer = 0; peer < size; peer++) {
    Served& s = serving_[peer];
    if (peer == rank) continue;
    int there = 0;
    if (s.stage == 0 && !calls_.iprobe(peer, kAskTag, calls_.comm, &there, status) && there)
      receive(s.operation, peer, kAskTag, &s.ask, sizeof s.ask), s.stage = 1;
    if (s.stage == 0 || !done(s.operation)) continue;
    s.operation.parts.clear();
    if (s.stage == 2) {
      s.stage = 0;
      continue;
    }
    const Ask& a = s.ask;
    Window& window = window_of(peer, a);
    s.stage = 0;
    if (a.kind == kNotify) {
      window.notified[int(a.offset)]++;
      continue;
    }
    if (a.kind == kPut) receive(s.operation, peer, kPutTag, window.base + a.offset, a.bytes);
    else send(s.operation, peer, kGotTag, window.base + a.offset, a.bytes);
    s.stage = 2;
  }
}

bool MpiTransport::test(Request request) {
  if (!request) return true;
  for (auto at = queues_.begin(); at != queues_.end();) {
    pump(at->second);
    at = at->second.under_way.empty() ? queues_.erase(at) : std::next(at);
  }
  serve();
  const auto at = operations_.find(request);
  if (at == operations_.end()) fail(Status::native, "a request that was complete already");
  if (!done(at->second)) return false;
  operations_.erase(at);
  return true;
}

void MpiTransport::send_heartbeat(int peer, const void* data, int64_t bytes) {
  Heartbeat& heartbeat = heartbeats_[peer];
  if (heartbeat.part.data && !done(heartbeat.part)) return;  // the heartbeat before is still in flight
  const int some = int(std::min<int64_t>(bytes, sizeof heartbeat.data));
  std::memcpy(heartbeat.data, data, size_t(some));
  heartbeat.part = {{}, peer, false, false, some, kHeartbeatTag, heartbeat.data, nullptr};
  post(heartbeat.part);
}

int64_t MpiTransport::receive_heartbeat(int peer, void* data, int64_t bytes) {
  alignas(16) uint8_t status[256];
  int there = 0, came = 0;
  if (calls_.iprobe(peer, kHeartbeatTag, calls_.comm, &there, status) || !there ||
      calls_.get_count(status, calls_.byte, &came))
    return 0;
  if (came > bytes) fail(Status::comm, "sent a heartbeat of %d bytes; at most %lld are taken", came, (long long)bytes);
  Operation heartbeat(&pool_);
  receive(heartbeat, peer, kHeartbeatTag, data, came);
  const int64_t end = now_ns() + timeout_ns;
  while (!done(heartbeat)) {  // it has already arrived
    if (now_ns() > end) fail(Status::comm, "did not complete a heartbeat within %.0f s", timeout_ns / 1e9);
    cpu_pause();
  }
  return came;
}

// MPI makes progress only inside its calls, so a nap must be short. It is a hundredth of the caller's time, so that a
// long wait uses no core.
void MpiTransport::idle(int64_t ns) {
  const timespec nap{0, std::min(ns, std::max<int64_t>(ns / 100, 20'000))};
  nanosleep(&nap, nullptr);
}

}  // namespace ckdist
