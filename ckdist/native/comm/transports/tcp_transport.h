// Transport over TCP sockets, which ckdist/comm/bootstrap/handshake.py has already connected and authenticated.
#pragma once
#include "comm/transports/stream_transport.h"

namespace ckdist {

class TcpTransport : public StreamTransport {
 public:
  // sockets: by rank; this rank's own entry is ignored. The transport takes ownership.
  TcpTransport(int rank, int size, const int* sockets, double timeout_s);
  ~TcpTransport() override;

  void idle(int64_t ns) override;
  const char* name() const override { return "tcp"; }

 private:
  int64_t write(int peer, const void* data, int64_t bytes) override;
  int64_t read(int peer, void* data, int64_t bytes) override;

  void look() override { wait(0); }
  void wait(int milliseconds);
  bool loses_large_packets(int peer) const;

  std::vector<int> sockets_;
  std::vector<bool> readable_;  // epoll reported data that is not completely read
  std::vector<bool> watched_;   // epoll watches for room to write
  int epoll_;
};

}  // namespace ckdist
