// What a wire is behind its C handle.
#pragma once
#include <memory>

#include "comm/channel.h"

struct ckdist_wire {
  std::shared_ptr<ckdist::Wire> wire;
};
