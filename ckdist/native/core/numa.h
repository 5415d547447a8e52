// Where pages lie: memory policies and page queries by the system calls themselves, so that no libnuma is needed.
//
// A refusal (a container without CAP_SYS_NICE, a kernel without NUMA) is not an error: pages then lie where they are
// touched first.
#pragma once
#include <cstdint>
#include <vector>

namespace ckdist {

// As the kernel numbers them (linux/mempolicy.h).
enum class MemoryPolicy : int { first_touch = 0, preferred = 1, bound = 2, interleaved = 3, local = 4 };

// The nodes on which this process's arenas are to lie from now on, and how many ranks share them. No nodes: that of the
// thread that makes an arena, preferred.
struct MemoryNodes {
  std::vector<int> nodes;
  int sharers = 1;
};
void set_memory_nodes(MemoryNodes nodes);
MemoryNodes memory_nodes();

// Gives pages that nobody has touched yet their nodes. One node is bound strictly where it surely has the room for
// every sharer, else preferred (a strict bind to a full node would end in the out-of-memory killer); several nodes are
// interleaved. `strict` false: never bound.
MemoryPolicy place_pages(void* begin, int64_t bytes, const MemoryNodes& wanted, bool strict);

// The policy of the page at `address`, or of the process for null; a negative errno where the kernel refuses.
int memory_policy(const void* address);

// nodes[i]: the node of the page `i` of `samples` spread evenly over `bytes`, or a negative errno (-ENOENT: never
// touched). `touch`: pages that nobody has touched are made first, their content unchanged. Returns 0 or a negative
// errno for the whole query.
int page_nodes(uint8_t* begin, int64_t bytes, int samples, bool touch, int32_t* nodes);

// 1: this process may use AMX tiles (asked for here, for all its threads); 0: the kernel or the CPU has none; a
// negative errno: refused.
int request_amx();

}  // namespace ckdist
