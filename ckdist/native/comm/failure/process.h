// Identifies processes of this host beyond their pids.
#pragma once
#include <cstdint>

namespace ckdist {

// Start time of a process in clock ticks; 0 if it has ended or is a zombie. Distinguishes a dead peer from a reused
// pid.
uint64_t process_start(int pid);

}  // namespace ckdist
