// Attention residuals: the input of a part of a layer is a weighted sum of earlier blocks' streams and of its own.
#include <cmath>

#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

constexpr int kMostBlocks = 64;

struct MixBlocks : StepRun<Inference, ckdist_mix_blocks_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out); }

  float* row(int32_t value, int64_t t) const {
    int64_t stride;
    float* const rows = r.floats(value, &stride);
    return rows + t * stride;
  }
  float* room() const { return reinterpret_cast<float*>(r.memory(thread)); }

  void run() {
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) make_row(t);
    r.meet(thread, index);
  }

  void make_row(int64_t t) const {
    const int64_t n = r.value(step.out).width;
    float *const sum = row(step.sum, t), *const out = row(step.out, t);
    const auto added = [&](int32_t x, int32_t y) {
      return Residual{r, thread, x, y, -1, -1, 0.f, 1.f, room()}.read(t, t);
    };
    std::copy_n(added(step.x, step.y), n, sum);
    if (step.z >= 0) r.kernels.elementwise.add_scaled(added(-1, step.z), 1.f, n, sum);
    const float* values[kMostBlocks + 1];
    float p[kMostBlocks + 1], total = 0.f;
    for (int i = 0; i < step.count; i++) values[i] = row(step.blocks[i], t);
    values[step.count] = sum;
    for (int i = 0; i <= step.count; i++) p[i] = score(values[i], n);
    const float largest = *std::max_element(p, p + step.count + 1);
    for (int i = 0; i <= step.count; i++) total += p[i] = std::exp(p[i] - largest);
    std::fill_n(out, n, 0.f);
    for (int i = 0; i <= step.count; i++) r.kernels.elementwise.add_scaled(values[i], p[i] / total, n, out);
  }

  float score(const float* x, int64_t n) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const float* const proj = r.vector(step.proj);
    k.rms_norm(x, step.norm < 0 ? proj : r.vector(step.norm), step.eps, n, room());
    constexpr int kLanes = 16;
    float sums[kLanes] = {}, total = 0.f;
    for (int64_t i = 0; i < n; i++) sums[i % kLanes] += step.norm < 0 ? room()[i] : room()[i] * proj[i];
    for (const float one : sums) total += one;
    return total;
  }
};

const RegisteredKind<MixBlocks> kKind(ckdist_step_mix_blocks);

}  // namespace
}  // namespace ckdist
