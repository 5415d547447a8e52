#pragma once
#include "api/export.h"

/* The row-wise kernels, one row per call; see kernels/elementwise.h. `isa` selects the kernel table; null: the table
   chosen at load. */
CKDIST_EXPORT int32_t ckdist_rms_norm(const char* isa, const float* x, const float* weight, float eps, int64_t n,
                                      float* out);
CKDIST_EXPORT int32_t ckdist_layer_norm(const char* isa, const float* x, const float* weight, const float* bias,
                                        float eps, int64_t n, float* out);
CKDIST_EXPORT int32_t ckdist_sum_parts(const char* isa, const float* x, const float* const* parts, int32_t count,
                                       int64_t n, float* out);
CKDIST_EXPORT int32_t ckdist_rope(const char* isa, const float* x, const float* cos, const float* sin, int64_t head_dim,
                                  float* out);
/* function: enum ckdist_gate */
CKDIST_EXPORT int32_t ckdist_gated(const char* isa, int32_t function, const float* gate, const float* up, int64_t n,
                                   float* out);
CKDIST_EXPORT int32_t ckdist_soft_cap(const char* isa, float* x, float cap, int64_t n);
CKDIST_EXPORT int32_t ckdist_add(const char* isa, const float* x, int64_t n, float* out);
/* Returns 1 if all are finite, else 0; out: (ceil(n / 1024), 16) */
CKDIST_EXPORT int32_t ckdist_maxima(const char* isa, const float* x, int64_t n, float* out);
CKDIST_EXPORT int32_t ckdist_maxima_allowed(const char* isa, const float* x, const uint32_t* allowed, float removed,
                                            int64_t n, float* kept, float* out);
CKDIST_EXPORT int32_t ckdist_sum_exp(const char* isa, const float* x, int64_t n, float shift, float scale, float* terms,
                                     double* sum);
CKDIST_EXPORT int32_t ckdist_sum_at_least(const char* isa, const float* x, const float* terms, int64_t n,
                                          float threshold, double* sum);

/* The reductions of kernels/reduce.h: `count` parts into one out. `element`: 0 float32, 1 bfloat16, 2 float16, 3
   int32, 4 int8. `op`: 0 sum, 1 max, 2 min. `form`: 0 parts and out of type `element`, 1 float32 out, 2 float32
   parts. */
CKDIST_EXPORT int32_t ckdist_fold(const char* isa, int32_t element, int32_t op, int32_t form, const void* const* parts,
                                  int32_t count, int64_t n, void* out);
