#ifndef CKDIST_API_TOPOLOGY_H
#define CKDIST_API_TOPOLOGY_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The NUMA nodes on which the weights, caches and buffers that this process makes from now on lie: one is bound while
   it surely has the room for each of `sharers` ranks, else preferred; several are interleaved; none: that of the thread
   that makes them. */
CKDIST_EXPORT int ckdist_place_memory(const int32_t* nodes, int32_t count, int32_t sharers);

/* nodes[i]: where the page i of `samples` spread over `bytes` lies, or a negative errno (-2: never touched). `touch`:
   untouched pages are made first. Returns 0, or a negative errno where the kernel refuses to tell. */
CKDIST_EXPORT int32_t ckdist_page_nodes(const void* address, int64_t bytes, int32_t samples, int32_t touch,
                                        int32_t* nodes);

/* The memory policy of a page, or of the process for null: 0 default, 1 preferred, 2 bind, 3 interleave, 4 local; or a
 * negative errno. */
CKDIST_EXPORT int32_t ckdist_memory_policy(const void* address);

/* Asks for AMX tiles, for all threads: 1 granted, 0 there are none, or a negative errno. */
CKDIST_EXPORT int32_t ckdist_request_amx(void);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
