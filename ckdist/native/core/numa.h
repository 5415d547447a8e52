// NUMA placement of pages: memory policies and page queries by system calls, without libnuma.
//
// A refusal (a container without CAP_SYS_NICE, a kernel without NUMA) is not an error: pages then lie on the node of
// their first touch.
#pragma once
#include <cstdint>
#include <vector>

namespace ckdist {

// The nodes for this process's arenas from now on, and the number of ranks that share them. No nodes: the node of the
// thread that allocates an arena, preferred.
struct MemoryNodes {
  std::vector<int> nodes;
  int sharers = 1;
};
void set_memory_nodes(MemoryNodes nodes);
MemoryNodes memory_nodes();

// Sets the nodes of untouched pages. A single node is bound strictly if it certainly has room for every sharer, else
// preferred: a strict bind to a full node would invoke the out-of-memory killer. Several nodes are interleaved.
// `strict` false: never bound.
void place_pages(void* begin, int64_t bytes, const MemoryNodes& wanted, bool strict);

// The policy of the page at `address`, or of the process if null. Returns a negative errno if the kernel refuses.
int memory_policy(const void* address);

// nodes[i]: the node of page `i` of `samples` pages spread evenly over `bytes`, or a negative errno (-ENOENT: never
// touched). `touch`: untouched pages are allocated first, without changing content. Returns 0, or a negative errno for
// the whole query.
int page_nodes(uint8_t* begin, int64_t bytes, int samples, bool touch, int32_t* nodes);

// Requests AMX tiles for all threads of this process. 1: granted; 0: the kernel or the CPU has none; a negative errno:
// refused.
int request_amx();

}  // namespace ckdist
