#ifndef CKDIST_API_MACHINE_H
#define CKDIST_API_MACHINE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Bytes per second that `threads` threads read together from memory, each from `bytes_each` of its own: the best of `repeats`
   passes. `cpus`: one per thread, or null. */
CKDIST_EXPORT int ckdist_read_bandwidth(int32_t threads, const int32_t* cpus, int64_t bytes_each, int32_t repeats, double* out);

#ifdef __cplusplus
} // extern "C"
#endif
#endif
