#include "kernels/elementwise.h"
#include <cmath>
#include "kernels/isa/activations.h"
namespace ckdist {
namespace CKDIST_ISA {
namespace {
void rms_norm(const float* x, const float* w, float eps, int64_t n, float* out) {
  float s = 0;
  for (int64_t i = 0; i < n; i++) s += x[i] * x[i];
  s = 1 / std::sqrt(s / n + eps);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] * s * w[i];
}
void sum_parts(const float* x, const float* const* parts, int count, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) {
    float s = x ? x[i] + parts[0][i] : parts[0][i];
    for (int p = 1; p < count; p++) s += parts[p][i];
    out[i] = s;
  }
}
void rope(const float* x, const float* c, const float* s, int64_t hd, float* out) {
  for (int64_t i = 0; i < hd / 2; i++) {
    float a = x[i], b = x[i + hd / 2];
    out[i] = a * c[i] - b * s[i], out[i + hd / 2] = b * c[i] + a * s[i];
  }
}
void gated(GateFunction f, const float* g, const float* u, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++)
    out[i] = u[i] * (f == GateFunction::silu ? g[i] / (1 + std::exp(-g[i])) : 0.5f * g[i] * (1 + std::tanh(0.7978845608f * (g[i] + 0.044715f * g[i] * g[i] * g[i]))));
}
void soft_cap(float* x, float cap, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = cap * std::tanh(x[i] / cap);
}
void add(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] += x[i];
}
}
extern const ElementwiseKernel elementwise_kernel = {rms_norm, sum_parts, rope, gated, soft_cap, prepare_activations, add};
}
}
