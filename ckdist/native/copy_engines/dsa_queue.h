// The work queues that the kernel's idxd driver gives to user programs: found in sysfs, opened by their character
// devices.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "copy_engines/dsa_engine.h"

namespace ckdist {

struct DsaQueue {
  DsaQueueLimits limits;
  std::string path;  // of the character device
  int node;          // -1: the kernel does not say
  bool shared;
};

// The enabled user queues below `root` ("" for the running system) that could copy here, those of `node` first, then
// those of unknown nodes. Where there are none, `missing` becomes what is missing.
std::vector<DsaQueue> find_dsa_queues(const std::string& root, int node, std::string* missing);

// Opens a queue for this process; null with the reason where that fails. Lowers `limits` where the kernel takes less.
std::unique_ptr<DsaPortal> open_dsa_queue(const DsaQueue& queue, DsaQueueLimits* limits, std::string* reason);

}  // namespace ckdist
