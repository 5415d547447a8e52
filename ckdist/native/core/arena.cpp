#include "core/arena.h"

#include <sys/mman.h>

#include "core/error.h"

namespace ckdist {

Arena::~Arena() {
  if (data_) munmap(data_, bytes_);
}

void Arena::reserve(int64_t bytes) {
  bytes_ = (bytes + (2 << 20)) & ~int64_t((2 << 20) - 1);
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail(Status::capacity, "cannot map %lld bytes", (long long)bytes);
  madvise(at, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(at);
}

}  // namespace ckdist
