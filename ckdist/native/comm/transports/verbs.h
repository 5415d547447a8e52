// Transport over RDMA verbs: reliable connections between all ranks of a world, on RoCE or InfiniBand.
//
// Opened in two steps, for the ranks must exchange addresses by other means in between: open, address() to everyone,
// connect(). comm/transports/verbs_frames.h says what travels. Where the library, the headers at build time or a device
// are missing, open says so.
#pragma once
#include <memory>

#include "comm/transports/transport.h"

namespace ckdist {

class Verbs : public Transport {
 public:
  // Error(config) with the reason when it cannot be. gid_index: of the port's table (comm/transports/verbs.py).
  static std::unique_ptr<Verbs> open(const char* device, int port, int gid_index, int rank, int size, double timeout_s);
  static void check_available();  // Error(config) with the reason when verbs cannot work in this process at all
  // Does a port carry data? Two queue pairs on it are connected to one another, and one writes to the other's memory.
  // Error with the reason when that does not come about within `seconds`.
  static void try_port(const char* device, int port, int gid_index, double seconds);

  static int64_t address_bytes(int size);
  virtual void address(uint8_t* out) const = 0;
  virtual void connect(
      const uint8_t* all) = 0;  // (size, address_bytes(size)); every rank connects before any uses the transport

 protected:
  using Transport::Transport;
};

}  // namespace ckdist
