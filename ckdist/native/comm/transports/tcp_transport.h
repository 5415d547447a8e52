// Transport over TCP sockets that ckdist/comm/bootstrap/handshake.py has connected and authenticated already.
#pragma once
#include "comm/transports/stream_transport.h"

namespace ckdist {

class TcpTransport : public StreamTransport {
 public:
  // sockets: (size, lanes), this rank's own entries ignored; they belong to the transport from here on.
  TcpTransport(int rank, int size, int lanes, const int* sockets, double timeout_s);
  ~TcpTransport() override;

  void idle(int64_t ns) override;
  const char* name() const override { return "tcp"; }

 private:
  int64_t write(int peer, int lane, const void* data, int64_t bytes) override;
  int64_t read(int peer, int lane, void* data, int64_t bytes) override;

  void look() override { wait(0); }
  void wait(int milliseconds);
  bool loses_large_packets(int peer, int lane) const;

  std::vector<int> sockets_;
  std::vector<bool> readable_;  // epoll said so, and not all has been read since
  std::vector<bool> watched_;   // epoll tells when the socket takes more
  int epoll_;
};

}  // namespace ckdist
