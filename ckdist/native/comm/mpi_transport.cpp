#include "comm/mpi_transport.h"

#include <time.h>

#include <algorithm>

#include "core/error.h"

namespace ckdist {

namespace {
constexpr int64_t kMost = 1 << 30;  // bytes in one message: MPI counts in int
// Below the tags of channels, which begin at 8.
constexpr int kAskTag = 1, kPutTag = 2, kGotTag = 3;
}  // namespace

void MpiTransport::send(Operation& operation, int peer, int tag, const void* data, int64_t bytes) {
  for (int64_t at = 0; at == 0 || at < bytes; at += kMost) {
    operation.parts.push_back({{}, peer, false});
    if (calls_.isend(static_cast<const uint8_t*>(data) + at, int(std::min(kMost, bytes - at)), calls_.byte, peer, tag, calls_.comm, operation.parts.back().handle))
      fail(Status::comm, "MPI refused to send %lld bytes to rank %d", (long long)bytes, peer);
  }
}

void MpiTransport::receive(Operation& operation, int peer, int tag, void* data, int64_t bytes) {
  for (int64_t at = 0; at == 0 || at < bytes; at += kMost) {
    operation.parts.push_back({{}, peer, false});
    if (calls_.irecv(static_cast<uint8_t*>(data) + at, int(std::min(kMost, bytes - at)), calls_.byte, peer, tag, calls_.comm, operation.parts.back().handle))
      fail(Status::comm, "MPI refused to receive %lld bytes from rank %d", (long long)bytes, peer);
  }
}

bool MpiTransport::done(Operation& operation) {
  alignas(16) uint8_t status[256];  // larger than any implementation's MPI_Status
  bool all = true;
  for (Part& part : operation.parts) {
    int flag = part.done;
    if (!part.done && calls_.test(part.handle, &flag, status))
      fail(Status::comm, "MPI reports that a message of rank %d failed: it is lost, or sent another size than was expected", part.peer);
    part.done = flag;
    all &= part.done;
  }
  return all;
}

Transport::Request MpiTransport::isend(int peer, int tag, const void* data, int64_t bytes) {
  send(operations_[++last_], peer, tag, data, bytes);
  return last_;
}

Transport::Request MpiTransport::irecv(int peer, int tag, void* data, int64_t bytes) {
  receive(operations_[++last_], peer, tag, data, bytes);
  return last_;
}

void MpiTransport::expose(int window, void* base, int64_t bytes) { windows_[window] = {static_cast<uint8_t*>(base), bytes, {}}; }

Transport::Request MpiTransport::ask(int peer, const Ask& ask, Operation** out) {
  Operation& operation = operations_[++last_];
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
  Operation* operation;
  return ask(peer, {kNotify, window, slot, 0}, &operation);
}

uint64_t MpiTransport::notified(int window, int slot) {
  serve();
  return windows_[window].notified[slot];
}

void MpiTransport::serve() {
  if (windows_.empty()) return;
  alignas(16) uint8_t status[256];
  for (int peer = 0; peer < size; peer++) {
    Served& s = serving_[peer];
    if (peer == rank) continue;
    int there = 0;
    if (s.stage == 0 && !probe_(peer, kAskTag, calls_.comm, &there, status) && there) receive(s.operation, peer, kAskTag, &s.ask, sizeof s.ask), s.stage = 1;
    if (s.stage == 0 || !done(s.operation)) continue;
    s.operation.parts.clear();
    if (s.stage == 2) {
      s.stage = 0;
      continue;
    }
    const auto found = windows_.find(int(s.ask.window));
    const Ask& a = s.ask;
    if (found == windows_.end()) fail(Status::comm, "rank %d addressed a window that this rank did not expose", peer);
    Window& window = found->second;
    s.stage = 0;
    if (a.kind == kNotify) {
      window.notified[int(a.offset)]++;
      continue;
    }
    if (a.offset < 0 || a.bytes < 0 || a.offset > window.bytes || a.bytes > window.bytes - a.offset) fail(Status::comm, "rank %d addressed bytes beyond a window's end", peer);
    if (a.kind == kPut) receive(s.operation, peer, kPutTag, window.base + a.offset, a.bytes);
    else send(s.operation, peer, kGotTag, window.base + a.offset, a.bytes);
    s.stage = 2;
  }
}

bool MpiTransport::test(Request request) {
  if (!request) return true;
  serve();
  const auto at = operations_.find(request);
  if (at == operations_.end()) fail(Status::native, "a request that was complete already");
  if (!done(at->second)) return false;
  operations_.erase(at);
  return true;
}

// MPI makes progress only inside its calls: a nap must be short, a hundredth of what the caller would wait, so that one who waits
// for long burns no core.
void MpiTransport::idle(int64_t ns) {
  const timespec nap{0, std::min(ns, std::max<int64_t>(ns / 100, 20'000))};
  nanosleep(&nap, nullptr);
}

}  // namespace ckdist
