// Transport over TCP sockets, which ckdist/comm/bootstrap/handshake.py has already connected and authenticated. Their
// bytes are sealed, unless the user chose otherwise.
#pragma once
#include <linux/tcp.h>

#include "comm/transports/stream_transport.h"

namespace ckdist {

class TcpTransport : public StreamTransport {
 public:
  // sockets: by rank; this rank's own entry is -1.
  TcpTransport(int rank, int size, std::deque<SealedSocket> sockets, double timeout_s);
  ~TcpTransport() override;

  void idle(int64_t ns) override;
  const char* name() const override { return "tcp"; }
  bool has_settled(int peer) override;
  void mend_stalled(int peer) override;

  // Sockets outlive their connections. Call it before the transport is used.
  std::shared_ptr<BrokenSockets> outlive_connections();
  SealedSocket& socket(int number);  // of data by rank, then of heartbeats by rank

 private:
  int64_t write(int peer, const void* data, int64_t bytes) override;
  bool flush(int peer) override { return sockets_[peer].flush(); }
  int64_t read(int peer, void* data, int64_t bytes) override;

  void look() override { wait(0); }
  void wait(int milliseconds);
  void watch(int peer, int operation, bool for_room);
  bool heartbeats_pass(int peer, tcp_info* data) const;

  std::deque<SealedSocket> sockets_;
  std::shared_ptr<BrokenSockets> broken_ = std::make_shared<BrokenSockets>();
  std::vector<bool> readable_;  // epoll reported data that is not completely read
  std::vector<bool> watched_;   // epoll watches for room to write
  std::vector<int64_t> stalled_ns_;  // when the connection was last found to carry nothing
  int epoll_;
};

}  // namespace ckdist
