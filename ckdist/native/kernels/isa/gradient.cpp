// Row-wise kernels of training.
#include "kernels/gradient.h"

#include "kernels/isa/lanes.h"
#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kStreams = 4;  // independent partial results, to hide the latency of an addition

// Sum of term(i, lanes) over a row. Absent lanes must be 0.
template <class Term>
CKDIST_INLINE float sum(int64_t n, Term&& term) {
  Vec sums[kStreams] = {set(0), set(0), set(0), set(0)};
  int64_t i = 0;
  for (; n - i >= kStreams * kLanes; i += kStreams * kLanes)
    for (int s = 0; s < kStreams; ++s) sums[s] = term(i + s * kLanes, kLanes, sums[s]);
  for (; i < n; i += kLanes) sums[0] = term(i, lanes_left(n, i), sums[0]);
  return reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float dot(const float* x, const float* y, int64_t n) {
  return sum(n,
             [&](int64_t i, int lanes, Vec s) { return fma(load_lanes(x + i, lanes), load_lanes(y + i, lanes), s); });
}

void rms_norm(const float* x, const float* dy, const float* weight, float eps, int64_t n, float* dx, float* dw) {
  const float r = 1.0f / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + eps);
  const float inner = sum(n, [&](int64_t i, int lanes, Vec s) {
    return fma(load_lanes(dy + i, lanes) * load_lanes(weight + i, lanes), load_lanes(x + i, lanes), s);
  });
  const Vec factor = set(r), mean = set(inner * r * r / static_cast<float>(n));
  each(n, [&](int64_t i, int lanes) {
    const Vec a = load_lanes(x + i, lanes), d = load_lanes(dy + i, lanes);
    if (dw) store_lanes(dw + i, fma(d, a * factor, load_lanes(dw + i, lanes)), lanes);
    store_lanes(dx + i, factor * fnma(a, mean, d * load_lanes(weight + i, lanes)), lanes);
  });
}

}  // namespace

extern const GradientKernel gradient_kernel = {rms_norm};

}  // namespace CKDIST_ISA
}  // namespace ckdist
