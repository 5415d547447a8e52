// Kernels that do nothing but load the machine, to measure its limits.
#pragma once
#include <cstdint>

namespace ckdist {

struct MachineKernel {
  // Reads `bytes` (a multiple of 512) once, front to back; returns something that depends on all of them.
  uint64_t (*read)(const uint8_t* data, int64_t bytes);
};

}  // namespace ckdist
