// Row-wise kernels of training: the backward pass without matrix products. The order of a sum depends only on the row's
// length.
#pragma once
#include <cstdint>

namespace ckdist {

struct GradientKernel {
  // With r = 1 / rms(x), n = x r: dx = r (dy w - n mean(dy w n)); dw[i] += dy[i] n[i] unless null.
  void (*rms_norm)(const float* x, const float* dy, const float* weight, float eps, int64_t n, float* dx, float* dw);
};

}  // namespace ckdist
