// Reads a value at an address of any alignment. It is inlined, so that no copy for one instruction set can be linked
// into another.
#pragma once
#include <cstring>

namespace ckdist {

template <class T>
static inline __attribute__((always_inline)) T read_as(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace ckdist
