#ifndef CKDIST_API_MACHINE_H
#define CKDIST_API_MACHINE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The machine's limits, each by code that does nothing else. `cpus`: one per thread, or null. */

/* Bytes per second that `threads` threads read together from memory, each from `bytes_each` of its own: the best of
   `repeats` passes. */
CKDIST_EXPORT int ckdist_read_bandwidth(int32_t threads, const int32_t* cpus, int64_t bytes_each, int32_t repeats,
                                        double* out);

/* Operations per second of `threads` threads together in the arithmetic of products with activations of `format`
   (kernels.h's numbers: 0 float32, 1 bfloat16, 2 int8) on level `isa` (null: the one chosen at load), the best of
   `repeats` runs of about `seconds`. */
CKDIST_EXPORT int ckdist_arithmetic_rate(const char* isa, int32_t threads, const int32_t* cpus, int32_t format,
                                         double seconds, int32_t repeats, double* out);

/* Operations per second of `threads` threads together in products of `tokens` rows with (rows, cols) weights of `type`,
   each thread with its own, whose bytes are all alike: the best of `repeats` runs of about `seconds`. Small matrices
   stay in a core's caches, of large ones it is the memory that counts. */
CKDIST_EXPORT int ckdist_product_rate(const char* isa, int32_t type, int32_t threads, const int32_t* cpus, int64_t rows,
                                      int64_t cols, int64_t tokens, double seconds, int32_t repeats, double* out);

/* Seconds of one barrier of the threads of a rank. */
CKDIST_EXPORT int ckdist_barrier_seconds(int32_t threads, const int32_t* cpus, int32_t spins, double* out);

/* Seconds that a cache line takes from one thread to another and back: the median of `repeats` batches. */
CKDIST_EXPORT int ckdist_line_round_trip(const int32_t* cpus, int32_t repeats, double* out);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
