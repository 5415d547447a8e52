#pragma once
#include "api/export.h"

/* The machine's limits, each measured by code that does nothing else. `cpus`: one per thread, or null. */

/* Bytes per second that `threads` threads together read from memory, each from its own `bytes_each` bytes: the best
   of `repeats` passes. */
CKDIST_EXPORT int ckdist_read_bandwidth(int32_t threads, const int32_t* cpus, int64_t bytes_each, int32_t repeats,
                                        double* out);

/* Operations per second of `threads` threads together, in the arithmetic of products with activations of `format`
   (numbers as in kernels_api.h: 0 float32, 1 bfloat16, 2 int8) on level `isa` (null: the level chosen at load): the
   best of `repeats` runs of about `seconds`. */
CKDIST_EXPORT int ckdist_arithmetic_rate(const char* isa, int32_t threads, const int32_t* cpus, int32_t format,
                                         double seconds, int32_t repeats, double* out);

/* Operations per second of `threads` threads together, in products of `tokens` rows by (rows, cols) weights of
   `type`: the median of `repeats` runs of about `seconds`. Each thread has its own weights, whose bytes are all the
   same. Small matrices stay in a core's caches, large ones come from memory. Threads wait for each other after equal
   work, as in steps, so a rate is that of the slowest thread. */
CKDIST_EXPORT int ckdist_product_rate(const char* isa, int32_t type, int32_t threads, const int32_t* cpus, int64_t rows,
                                      int64_t cols, int64_t tokens, double seconds, int32_t repeats, double* out);

/* Seconds of one barrier of a rank's threads. `caches`: as in pool_api.h. */
CKDIST_EXPORT int ckdist_barrier_seconds(int32_t threads, const int32_t* cpus, const int32_t* caches, int32_t spins,
                                         double* out);

/* Seconds of a cache line's round trip between two threads: the median of `repeats` batches. */
CKDIST_EXPORT int ckdist_line_round_trip(const int32_t* cpus, int32_t repeats, double* out);
