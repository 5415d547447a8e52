#include "api/elementwise_api.h"
#include "bindings/isa_choice.h"

using namespace ckdist;

int32_t ckdist_rms_norm(const char* isa, const float* x, const float* weight, float eps, int64_t n, float* out) {
  return guard([&] { kernels_by_name(isa).elementwise.rms_norm(x, weight, eps, n, out); });
}
int32_t ckdist_layer_norm(const char* isa, const float* x, const float* weight, const float* bias, float eps, int64_t n,
                          float* out) {
  return guard([&] { kernels_by_name(isa).elementwise.layer_norm(x, weight, bias, eps, n, out); });
}

int32_t ckdist_sum_parts(const char* isa, const float* x, const float* const* parts, int32_t count, int64_t n,
                         float* out) {
  return guard([&] {
    if (count < 1) fail(Status::config, "a sum of parts needs at least 1 part, not %d", count);
    kernels_by_name(isa).elementwise.sum_parts(x, parts, count, n, out);
  });
}

int32_t ckdist_rope(const char* isa, const float* x, const float* cos, const float* sin, int64_t head_dim, float* out) {
  return guard([&] { kernels_by_name(isa).elementwise.rope(x, cos, sin, head_dim, out); });
}

int32_t ckdist_gated(const char* isa, int32_t function, const float* gate, const float* up, int64_t n, float* out) {
  return guard([&] {
    if (function < 0 || (function & 255) > 10)
      fail(Status::config, "gate function %d is not known; its low 8 bits are a GateFunction of kernels/elementwise.h",
           function);
    kernels_by_name(isa).elementwise.gated(static_cast<GateFunction>(function), gate, up, n, out);
  });
}

int32_t ckdist_soft_cap(const char* isa, float* x, float cap, int64_t n) {
  return guard([&] { kernels_by_name(isa).elementwise.soft_cap(x, cap, n); });
}

int32_t ckdist_add(const char* isa, const float* x, int64_t n, float* out) {
  return guard([&] { kernels_by_name(isa).elementwise.add(x, n, out); });
}

int32_t ckdist_maxima(const char* isa, const float* x, int64_t n, float* out) {
  return guard_value([&] { return kernels_by_name(isa).elementwise.maxima(x, n, out); });
}

int32_t ckdist_maxima_allowed(const char* isa, const float* x, const uint32_t* allowed, float removed, int64_t n,
                              float* kept, float* out) {
  return guard_value(
      [&] { return kernels_by_name(isa).elementwise.maxima_allowed(x, allowed, removed, n, kept, out); });
}

int32_t ckdist_sum_exp(const char* isa, const float* x, int64_t n, float shift, float scale, float* terms,
                       double* sum) {
  return guard([&] { *sum = kernels_by_name(isa).elementwise.sum_exp(x, n, shift, scale, terms); });
}

int32_t ckdist_sum_at_least(const char* isa, const float* x, const float* terms, int64_t n, float threshold,
                            double* sum) {
  return guard([&] { *sum = kernels_by_name(isa).elementwise.sum_at_least(x, terms, n, threshold); });
}

int32_t ckdist_fold(const char* isa, int32_t element, int32_t op, int32_t form, const void* const* parts, int32_t count,
                    int64_t n, void* out) {
  return guard([&] {
    if (element < 0 || element >= kReduceTypes || op < 0 || op >= kReduceOps || form < 0 || form > 2 || count < 1)
      fail(Status::config, "element %d, operation %d, form %d, %d parts: at most %d, %d, 2, and at least 1 part",
           element, op, form, count, kReduceTypes - 1, kReduceOps - 1);
    const ReduceKernel& reduce = kernels_by_name(isa).reduce;
    const Fold fold = (form == 0 ? reduce.fold : form == 1 ? reduce.widen : reduce.narrow)[element][op];
    fold(&out, 1, parts, count, n);
  });
}
