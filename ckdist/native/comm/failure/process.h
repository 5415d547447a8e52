// Is another process of this host still the one that was met?
#pragma once
#include <cstdint>

namespace ckdist {

// Start time of a process in clock ticks, 0 when it is gone or a zombie: tells a dead peer from a reused pid.
uint64_t process_start(int pid);

}  // namespace ckdist
