// The arenas of a host's ranks in one segment that all of them map. Peers read and write data there in place.
//
// A rank allocates only in its own arena and touches the pages first, so they lie on its own NUMA node. Only the owner
// keeps the list of allocations; peers use offsets.
#pragma once
#include <map>
#include <mutex>

#include "comm/bootstrap/segment.h"

namespace ckdist {

class HostMemory {
 public:
  // `index`: local rank; index 0 creates the segment and ignores `path`. All ranks pass the same arena size.
  HostMemory(const std::string& path, int index, int count, int64_t arena_bytes);

  const int index, count;
  const std::string& path() const { return segment_.path(); }
  int64_t arena_bytes() const { return arena_bytes_; }
  uint8_t* arena(int i) const { return segment_.data() + i * stride_; }

  // Zeroed, aligned to 4096. `touched`: this rank touches all pages; else it must write them before its peers do.
  // Throws Error(capacity) with both numbers.
  void* allocate(int64_t bytes, bool touched = true);
  void release(void* data);
  // Offset of `data` in this rank's arena, or -1.
  int64_t offset(const void* data, int64_t bytes) const;

 private:
  int64_t arena_bytes_, stride_;
  Segment segment_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_, used_;  // offset -> bytes
};

}  // namespace ckdist
