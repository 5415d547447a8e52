// Kernels that do nothing but load the machine, to measure its limits.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

struct MachineKernel {
  // Reads `bytes` (a multiple of 2,048) once, both halves by turns; returns something that depends on all of them.
  uint64_t (*read)(const uint8_t* data, int64_t bytes);

  // Multiplies and adds registers only, with the instructions that products of this activation format use; returns the
  // operations done, two for a multiplication and its addition. `sink` makes the result needed.
  int64_t (*multiply_add)(ActivationFormat format, int64_t rounds, uint64_t* sink);
};

}  // namespace ckdist
