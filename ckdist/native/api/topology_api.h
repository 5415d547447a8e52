#pragma once
#include "api/export.h"

/* The NUMA nodes for the weights, caches and buffers that this process allocates from now on. One node: bound if it
   certainly has room for each of `sharers` ranks, else preferred. Several nodes: interleaved. No nodes: the node of
   the allocating thread. */
CKDIST_EXPORT int ckdist_place_memory(const int32_t* nodes, int32_t count, int32_t sharers);

/* nodes[i]: the node of page i of `samples` pages spread over `bytes`, or a negative errno (-2: never touched).
   `touch`: untouched pages are allocated first. Returns 0, or a negative errno if the kernel refuses. */
CKDIST_EXPORT int32_t ckdist_page_nodes(const void* address, int64_t bytes, int32_t samples, int32_t touch,
                                        int32_t* nodes);

/* The memory policy of a page, or of the process if null: 0 default, 1 preferred, 2 bind, 3 interleave, 4 local; or
   a negative errno. */
CKDIST_EXPORT int32_t ckdist_memory_policy(const void* address);

/* Requests AMX tiles for all threads: 1 granted, 0 not available, or a negative errno. */
CKDIST_EXPORT int32_t ckdist_request_amx(void);
