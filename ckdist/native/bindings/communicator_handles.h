// The definitions of opaque handles that several bindings use.
#pragma once
#include <memory>

#include "comm/communicator.h"
#include "comm/transports/verbs.h"

struct ckdist_communicator {
  std::unique_ptr<ckdist::Communicator> communicator;
};
struct ckdist_transport {
  std::shared_ptr<ckdist::Transport> transport;
};
struct ckdist_verbs {
  std::unique_ptr<ckdist::Verbs> transport;
};
