// The definition of the opaque transport handle.
#pragma once
#include <memory>

#include "comm/transports/transport.h"

struct ckdist_transport {
  std::shared_ptr<ckdist::Transport> transport;
};
