// Row-wise kernels of training: what a backward pass needs beside matrix products. A sum's order is fixed by the row's length.
#pragma once
#include <cstdint>

namespace ckdist {

struct GradientKernel {
  // With r = 1 / rms(x), n = x r: dx = r (dy w - n mean(dy w n)); dw[i] += dy[i] n[i] unless null.
  void (*rms_norm)(const float* x, const float* dy, const float* weight, float eps, int64_t n, float* dx, float* dw);
  // out[i] = x[i] * factor.
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  float (*dot)(const float* x, const float* y, int64_t n);
  float (*largest)(const float* x, int64_t n);
  // A row of n products q.k, of which [first, last) are visible, becomes exp(s - largest s) with s = cap(scale x), zeros elsewhere; returns
  // the log of the sum of exp(s). `inverse`: what makes the row a softmax. cap: 0 for none. 0 <= first < last <= n; scale > 0.
  float (*softmax)(float* x, int64_t n, int64_t first, int64_t last, float scale, float cap, float* inverse);
  // From the products and the log-sum-exp: x becomes p = exp(cap(scale x) - lse), and dp (the gradient by p) that by x:
  // p (dp - delta) scale cap'; zeros where nothing is visible.
  void (*softmax_grad)(float* x, float* dp, int64_t n, int64_t first, int64_t last, float scale, float cap, float log_sum_exp, float delta);
};

}  // namespace ckdist
