// The definition of the opaque ckdist_verbs, for bindings that take the transport out of it.
#pragma once
#include <memory>

#include "comm/transports/verbs.h"

struct ckdist_verbs {
  std::unique_ptr<ckdist::Verbs> transport;
};
