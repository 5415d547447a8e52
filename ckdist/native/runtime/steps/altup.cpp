// Alternating updates: several streams of hidden states. Each layer computes one and corrects all.
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

struct AltUp : InferenceRun<ckdist_altup_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out.first); }

  void run() {
    each_row(r.local_tokens, [&](int64_t t) { make_row(t); });
    r.meet(thread, index);
  }

  void make_row(int64_t t) const {
    const auto row = [&](int32_t value) { return r.floats(value).row(t); };
    const int64_t n = r.value(step.out.first).width;
    const float* x[kMostStreams];
    for (int j = 0; j < step.count; j++) x[j] = row(step.x[j]);
    const float* const y = step.y < 0 ? nullptr : row(step.y);
    float c[kMostStreams * kMostStreams];
    coefficients(y ? y : x[0], n, y ? 1 : step.count, c);
    for (int j = 0; j < step.count; j++) {
      float* const out = row(step.out.first + j);
      std::copy(x[j], x[j] + n, out);
      if (y) {
        for (int64_t d = 0; d < n; d++) out[d] += (1.f + c[j]) * (y[d] - x[0][d]);
        continue;
      }
      for (int i = 0; i < step.count; i++) r.kernels.elementwise.add_scaled(x[i], c[j * step.count + i], n, out);
    }
    if (!y) return;
    r.kernels.elementwise.scale_weighted(row(step.out.first), 1.f, r.vector(step.scale), n, row(step.active));
  }

  // c = coefs * tanh(router * rms_norm(v) / n), with `per` numbers for each stream.
  void coefficients(const float* v, int64_t n, int per, float* c) const {
    float* const normed = buffer();
    float modalities[kMostStreams];
    r.kernels.elementwise.rms_norm(v, r.vector(step.norm), step.eps, n, normed);
    for (int i = 0; i < step.count; i++)
      modalities[i] = std::tanh(dot(r.vector(step.router) + i * n, normed, n) / float(n));
    for (int i = 0; i < step.count * per; i++)
      c[i] = dot(r.vector(step.coefs) + i * step.count, modalities, step.count);
  }
};

struct MatchRms : InferenceRun<ckdist_match_rms_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out.first); }

  void run() {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int64_t n = r.value(step.out.first).width;
    const Residual first = {r, thread, buffer(), step.x[0]};
    each_row(r.local_tokens, [&](int64_t t) {
      float* const out = r.floats(step.out.first).row(t);
      const float* const x = first.read(t);
      const float rms = std::sqrt(k.sum_squares(x, n) / float(n));
      std::copy(x, x + n, out);
      for (int i = 1; i < step.count; i++) {
        const float* const y = r.floats(step.x[i]).row(t);
        const float by = rms / std::sqrt(std::max(k.sum_squares(y, n) / float(n), step.least));
        if (step.out.count == 1) k.add_scaled(y, by, n, out);
        else scaled(y, by, n, r.floats(step.out.first + i).row(t));
      }
      if (step.out.count == 1) scaled(out, 1.f / float(step.count), n, out);
    });
    r.meet(thread, index);
  }
};

const RegisteredKind<AltUp> kAltUp(ckdist_step_altup);
const RegisteredKind<MatchRms> kMatchRms(ckdist_step_match_rms);

}  // namespace
}  // namespace ckdist
