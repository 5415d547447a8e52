// Attention residuals: the input of a part of a layer is a weighted sum of earlier blocks' streams and of its own.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

constexpr int kMostBlocks = 64;

struct MixBlocks : InferenceRun<ckdist_mix_blocks_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.out); }

  void run() {
    each_row(r.local_tokens, [&](int64_t t) { make_row(t); });
    r.meet(thread, index);
  }

  void make_row(int64_t t) const {
    const int64_t n = r.value(step.out).width;
    float *const sum = r.floats(step.sum).row(t), *const out = r.floats(step.out).row(t);
    std::copy_n(Residual{r, thread, buffer(), step.y, step.x}.read(t), n, sum);
    if (step.z >= 0) r.kernels.elementwise.add_scaled(Residual{r, thread, buffer(), step.z}.read(t), 1.f, n, sum);
    const float* values[kMostBlocks + 1];
    float p[kMostBlocks + 1], total = 0.f;
    for (int i = 0; i < step.count; i++) values[i] = r.floats(step.blocks[i]).row(t);
    values[step.count] = sum;
    for (int i = 0; i <= step.count; i++) p[i] = score(values[i], n);
    const float largest = *std::max_element(p, p + step.count + 1);
    for (int i = 0; i <= step.count; i++) total += p[i] = std::exp(p[i] - largest);
    std::fill_n(out, n, 0.f);
    for (int i = 0; i <= step.count; i++) r.kernels.elementwise.add_scaled(values[i], p[i] / total, n, out);
  }

  float score(const float* x, int64_t n) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const float *const proj = r.vector(step.proj), *const normed = buffer();
    k.rms_norm(x, step.norm < 0 ? proj : r.vector(step.norm), step.eps, n, buffer());
    constexpr int kLanes = 16;
    float sums[kLanes] = {}, total = 0.f;
    for (int64_t i = 0; i < n; i++) sums[i % kLanes] += step.norm < 0 ? normed[i] : normed[i] * proj[i];
    for (const float one : sums) total += one;
    return total;
  }
};

const RegisteredKind<MixBlocks> kMixBlocks(ckdist_step_mix_blocks);

}  // namespace
}  // namespace ckdist
