// Alternating updates: several streams of hidden states. Each layer computes one and corrects all.
#include <cmath>

#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

constexpr int kMostStreams = 8;

// The sum of x[i] * y[i], in an order that depends only on n.
float dot(const float* x, const float* y, int64_t n) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {}, total = 0.f;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; l++) sums[l] += x[i + l] * y[i + l];
  for (; i < n; i++) total += x[i] * y[i];
  for (const float sum : sums) total += sum;
  return total;
}

struct AltUp : StepRun<Inference, ckdist_altup_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out.first); }

  float* row(int32_t value, int64_t t) const {
    int64_t stride;
    float* const rows = r.floats(value, &stride);
    return rows + t * stride;
  }

  void run() {
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) make_row(t);
    r.meet(thread, index);
  }

  void make_row(int64_t t) const {
    const int64_t n = r.value(step.out.first).width;
    const float* x[kMostStreams];
    for (int j = 0; j < step.count; j++) x[j] = row(step.x[j], t);
    const float* const y = step.y < 0 ? nullptr : row(step.y, t);
    float c[kMostStreams * kMostStreams];
    coefficients(y ? y : x[0], n, y ? 1 : step.count, c);
    for (int j = 0; j < step.count; j++) {
      float* const out = row(step.out.first + j, t);
      std::copy(x[j], x[j] + n, out);
      if (y) {
        for (int64_t d = 0; d < n; d++) out[d] += (1.f + c[j]) * (y[d] - x[0][d]);
        continue;
      }
      for (int i = 0; i < step.count; i++) r.kernels.elementwise.add_scaled(x[i], c[j * step.count + i], n, out);
    }
    if (!y) return;
    const float* const first = row(step.out.first, t);
    r.kernels.elementwise.scale_weighted(first, 1.f, r.vector(step.scale), n, row(step.active, t));
  }

  // c = coefs * tanh(router * rms_norm(v) / n), with `per` numbers for each stream.
  void coefficients(const float* v, int64_t n, int per, float* c) const {
    float* const normed = reinterpret_cast<float*>(r.memory(thread));
    float modalities[kMostStreams];
    r.kernels.elementwise.rms_norm(v, r.vector(step.norm), step.eps, n, normed);
    for (int i = 0; i < step.count; i++)
      modalities[i] = std::tanh(dot(r.vector(step.router) + i * n, normed, n) / float(n));
    for (int i = 0; i < step.count * per; i++)
      c[i] = dot(r.vector(step.coefs) + i * step.count, modalities, step.count);
  }
};

struct MatchRms : StepRun<Inference, ckdist_match_rms_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out.first); }

  void run() {
    const ElementwiseKernel& k = r.kernels.elementwise;
    float* const room = reinterpret_cast<float*>(r.memory(thread));
    const int64_t n = r.value(step.out.first).width;
    const Range own = r.rows_of(thread, r.local_tokens);
    int64_t stride;
    for (int64_t t = own.begin; t < own.end; t++) {
      float* out = r.floats(step.out.first, &stride) + t * n;
      const float* const x = Residual{r, thread, -1, step.x[0], -1, -1, 0.f, 1.f, room}.read(t, t);
      const float rms = std::sqrt(k.sum_squares(x, n) / float(n));
      std::copy(x, x + n, out);
      for (int i = 1; i < step.count; i++) {
        const float* const y = r.floats(step.x[i], &stride) + t * n;
        const float by = rms / std::sqrt(std::max(k.sum_squares(y, n) / float(n), step.least));
        if (step.out.count == 1) k.add_scaled(y, by, n, out);
        else scaled(y, by, n, r.floats(step.out.first + i, &stride) + t * n);
      }
      if (step.out.count == 1) scaled(out, 1.f / float(step.count), n, out);
    }
    r.meet(thread, index);
  }
};

const RegisteredKind<AltUp> kAltUp(ckdist_step_altup);
const RegisteredKind<MatchRms> kMatch(ckdist_step_match_rms);

}  // namespace
}  // namespace ckdist
