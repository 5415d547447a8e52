// What a group is behind its C handle.
#pragma once
#include <memory>
#include <string>

#include "comm/group.h"

struct ckdist_group {
  std::unique_ptr<ckdist::Group> group;
  std::string path;  // of its host's shared memory
};
