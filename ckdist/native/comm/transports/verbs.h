// Transport over RDMA verbs: reliable connections between all ranks of a world, on RoCE or InfiniBand.
//
// It is opened in two steps, because the ranks must exchange addresses by other means in between: open, address() to
// all ranks, connect(). comm/transports/verbs_frames.h defines the messages. If the library, the headers at build time
// or a device are missing, open fails with that reason.
#pragma once
#include <memory>

#include "comm/transports/transport.h"

namespace ckdist {

class Verbs : public Transport {
 public:
  // Throws Error(config) with the reason if it cannot be opened. gid_index: index in the port's table
  // (comm/transports/verbs.py).
  static std::unique_ptr<Verbs> open(const char* device, int port, int gid_index, int rank, int size, double timeout_s);
  static void check_available();  // throws Error(config) with the reason if verbs cannot work in this process
  // Tests whether a port carries data: connects two queue pairs on it, and one writes to the other's memory. Throws
  // Error with the reason if that does not succeed within `seconds`.
  static void try_port(const char* device, int port, int gid_index, double seconds);

  static int64_t address_bytes(int size);
  virtual void address(uint8_t* out) const = 0;
  // all: (size, address_bytes(size)). Every rank must connect before any rank uses the transport.
  virtual void connect(const uint8_t* all) = 0;

 protected:
  using Transport::Transport;
};

}  // namespace ckdist
