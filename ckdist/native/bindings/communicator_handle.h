// The definition of the opaque ckdist_communicator.
#pragma once
#include <memory>

#include "comm/communicator.h"

struct ckdist_communicator {
  std::unique_ptr<ckdist::Communicator> communicator;
};
