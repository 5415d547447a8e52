// The work queues that the kernel's idxd driver offers to user programs: found in sysfs, opened by their character
// devices.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "copy_engines/dsa_engine.h"

namespace ckdist {

struct DsaQueue {
  DsaQueueLimits limits;
  std::string path;  // path of the character device
  int node;          // -1: unknown
  bool shared;
};

// The enabled user queues below `root` ("" for the running system) that can copy here: queues of `node` first, then
// those of unknown nodes. If there are none, `missing` receives the reason.
std::vector<DsaQueue> find_dsa_queues(const std::string& root, int node, std::string* missing);

// Opens a queue for this process. Returns null and sets `reason` if that fails. Lowers `limits` if the kernel accepts
// less.
std::unique_ptr<DsaPortal> open_dsa_queue(const DsaQueue& queue, DsaQueueLimits* limits, std::string* reason);

}  // namespace ckdist
