// Plain loops that the compiler vectorises; memory is the limit. Contraction is off, so bits are equal on all ISAs.
#include "kernels/optimizer.h"

#include "core/mixed.h"
#include "kernels/half.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

void adamw(const AdamwNumbers& numbers, float* __restrict p, const float* __restrict g, float* __restrict mean,
           float* __restrict square, int64_t n) {
  const AdamwNumbers k = numbers;
  const float fresh1 = 1.0f - k.beta1, fresh2 = 1.0f - k.beta2;
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * k.scale;
    const float m = mean[i] + fresh1 * (gradient - mean[i]);
    const float v = k.beta2 * square[i] + fresh2 * gradient * gradient;
    mean[i] = m;
    square[i] = v;
    p[i] = k.keep * p[i] - k.rate * m / (__builtin_sqrtf(v) * k.root + k.eps);
  }
}

void sgd(const SgdNumbers& numbers, float* __restrict p, const float* __restrict g, float* __restrict momentum,
         int64_t n) {
  const SgdNumbers k = numbers;
  const float kept = k.first ? 0.0f : k.momentum;
  for (int64_t i = 0; i < n; ++i) {
    const float m = kept * momentum[i] + g[i] * k.scale;
    momentum[i] = m;
    p[i] = k.keep * p[i] - k.rate * m;
  }
}

void round(const float* __restrict x, int64_t n, uint32_t key, uint32_t column, uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of_float(x[i]), random = mixed(key + (column + uint32_t(i)) * kHashStep) >> 16;
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const uint32_t quiet = (bits & 0x007fffffu) != 0 ? 0x400000u : 0;  // a NaN stays one
    out[i] = uint16_t((finite ? bits + random : bits | quiet) >> 16);
  }
}

constexpr int64_t kFetchedAhead = 1024;  // floats; hardware prefetches one stream too late

double sum_squares(const float* __restrict x, int64_t n) {
  double sums[16] = {};
  int64_t i = 0;
  for (; n - i >= 16; i += 16) {
    __builtin_prefetch(x + i + kFetchedAhead);
    for (int lane = 0; lane < 16; ++lane) sums[lane] += double(x[i + lane]) * double(x[i + lane]);
  }
  for (int lane = 0; i < n; ++i, ++lane) sums[lane] += double(x[i]) * double(x[i]);
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace

extern const OptimizerKernel optimizer_kernel = {adamw, sgd, round, sum_squares};

}  // namespace CKDIST_ISA
}  // namespace ckdist
