#include "api/reconnection_api.h"

#include <unistd.h>

#include "bindings/communicator_handles.h"
#include "comm/transports/tcp_transport.h"
#include "core/error.h"

using namespace ckdist;

struct ckdist_reconnection {
  std::weak_ptr<TcpTransport> transport;
  std::shared_ptr<BrokenSockets> broken;

  template <class Action>
  int on(int32_t number, Action action) {
    return guard([&] {
      const std::shared_ptr<TcpTransport> held = transport.lock();
      if (!held) fail(Status::comm, "the transport is closed");
      action(held->socket(number));
    });
  }
};

static_assert(ckdist_broken_none == BrokenSockets::kNone && ckdist_broken_closed == BrokenSockets::kClosed);

int ckdist_reconnection_new(ckdist_transport* transport, ckdist_reconnection** out) {
  return guard([&] {
    const auto tcp = std::dynamic_pointer_cast<TcpTransport>(transport->transport);
    if (!tcp) fail(Status::config, "connections of %s cannot be made again", transport->transport->name());
    *out = new ckdist_reconnection{tcp, tcp->outlive_connections()};
  });
}
void ckdist_reconnection_free(ckdist_reconnection* reconnection) { delete reconnection; }
int ckdist_reconnection_next(ckdist_reconnection* reconnection, double seconds, int32_t* number) {
  return guard([&] { *number = reconnection->broken->next(seconds); });
}
int ckdist_reconnection_pause(ckdist_reconnection* reconnection, int32_t number, uint64_t* received,
                              uint64_t* attempt) {
  return reconnection->on(number, [&](SealedSocket& socket) {
    const SealedSocket::Pause pause = socket.pause();
    *received = pause.received, *attempt = pause.attempt;
  });
}
int ckdist_reconnection_resume(ckdist_reconnection* reconnection, int32_t number, int32_t fd, uint64_t received,
                               uint64_t attempt, int32_t mark) {
  bool taken = false;
  const int status = reconnection->on(number, [&](SealedSocket& socket) {
    taken = true;
    socket.resume(fd, received, attempt, mark != 0);
    socket.send_again(attempt);
  });
  if (!taken) close(fd);
  return status;
}
int ckdist_reconnection_give_up(ckdist_reconnection* reconnection, int32_t number, int32_t error) {
  return reconnection->on(number, [&](SealedSocket& socket) { socket.give_up(error); });
}
int ckdist_reconnection_waits(ckdist_reconnection* reconnection, int32_t number, int32_t* out) {
  return reconnection->on(number, [&](SealedSocket& socket) { *out = socket.waits(); });
}
