// The system's page size: 4 KiB on x86-64; 4, 16 or 64 KiB on Arm, depending on the kernel.
#pragma once
#include <unistd.h>

#include <cstdint>

namespace ckdist {

inline int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

}  // namespace ckdist
