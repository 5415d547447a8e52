// A hash of 32 bits: the random numbers that depend on a place only. It is inlined, so that no copy for one instruction
// set can be linked into another.
#pragma once
#include <cstdint>

namespace ckdist {

constexpr uint32_t kHashStep = 0x9e3779b9u;  // between the keys of neighbours

// The hash of program/ops/dropout.py.
static inline __attribute__((always_inline)) uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

}  // namespace ckdist
