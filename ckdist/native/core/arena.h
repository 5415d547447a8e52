// One block of memory for a rank's weights or cache, on the NUMA nodes that set_memory_nodes (core/numa.h) named:
// explicit huge pages where enough are reserved, else anonymous pages that the system may make huge. The latter exist
// only once touched, so the threads that fill the arena pay for them, not the maker.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ckdist {

class Arena {
 public:
  // Throws Error(capacity) with both numbers when the machine, or the control group, has less memory left than `bytes`.
  // `purpose` begins the message: "the weights".
  Arena(int64_t bytes, const char* purpose);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* data() const { return data_; }  // aligned to 2 MB
  int64_t size() const { return size_; }

 private:
  uint8_t* data_;
  int64_t size_;
};

// Throws Error(capacity) as the constructor does. Memory that was promised to others of this process, who have not
// touched it yet, is taken.
void require_memory(int64_t bytes, const char* purpose);

// `bytes` (negative: fewer) of memory that was made will be touched later.
void promise_memory(int64_t bytes);

// Bytes of explicit huge pages that nobody has claimed, on the wanted nodes.
int64_t unclaimed_huge_bytes();
// Makes every huge page now: one that cannot be had (a control group's limit on them) is refused here, where a touch
// would be a SIGBUS.
bool populate_huge(uint8_t* begin, int64_t bytes);

// Bytes that can still be allocated without swapping: of the machine, or of the control groups that this process is in.
int64_t available_memory();

}  // namespace ckdist
