// One block of memory for a rank's weights or cache, on the NUMA nodes that set_memory_nodes (core/numa.h) chose. It
// has explicit huge pages if enough are reserved, else anonymous pages, which the system may make huge. Anonymous pages
// are allocated at their first touch, by the threads that fill the arena.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ckdist {

class Arena {
 public:
  // Throws Error(capacity) with both numbers if the machine, or the control group, has less than `bytes` of memory
  // left. `purpose` begins the message, for example "the weights".
  Arena(int64_t bytes, const char* purpose);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* data() const { return data_; }  // aligned to 2 MB
  int64_t size() const { return size_; }
  // Announces that all of it will be touched. Its untouched pages count as promised memory while it lives.
  void promise();

 private:
  uint8_t* data_;
  int64_t size_;
  bool promised_ = false;
};

// Throws Error(capacity) as the constructor does. Promised memory that is not touched yet counts as used.
void require_memory(int64_t bytes, const char* purpose);

// Announces that `bytes` of allocated memory will be touched later. A negative number takes a promise back.
void promise_memory(int64_t bytes);
// Promised bytes that are not touched yet.
int64_t promised_memory();

// Bytes of unclaimed explicit huge pages on the wanted nodes.
int64_t unclaimed_huge_bytes();
// Allocates every huge page now. Returns false if one is not available (for example a limit of the control group); a
// later touch would raise SIGBUS.
bool populate_huge(uint8_t* begin, int64_t bytes);

// Bytes that can be allocated without swapping: the minimum over the machine and the control groups of this process.
int64_t available_memory();

}  // namespace ckdist
