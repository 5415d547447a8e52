#pragma once
#include "api/export.h"

/* A rank's threads, shared by executables and an optimizer; one of them runs at a time. The calling thread is the
   first thread. */
struct ckdist_pool;

/* `cpus`: one per thread, or null; `caches`: the number of each thread's last-level cache, or null; `spins`: polls
   before a waiting thread sleeps. */
CKDIST_EXPORT int ckdist_pool_new(int32_t threads, const int32_t* cpus, const int32_t* caches, int32_t spins,
                                  struct ckdist_pool** out);
CKDIST_EXPORT void ckdist_pool_free(struct ckdist_pool* pool);
