// Kernels that only load the machine, to measure its limits.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

struct MachineKernel {
  // Reads `bytes` (a multiple of 2,048) once, both halves in turn. Returns a value that depends on all of them.
  uint64_t (*read)(const uint8_t* data, int64_t bytes);

  // Multiplies and adds only registers, with the instructions of products with this activation format. Returns the
  // number of operations; a multiplication and its addition are two. `sink` keeps the result from being optimized away.
  int64_t (*multiply_add)(ActivationFormat format, int64_t rounds, uint64_t* sink);
};

}  // namespace ckdist
