// Rows cut at a number of standard deviations above their mean, and the sums that ranks exchange for it.
#include <cmath>

#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct ColumnSums : StepRun<Inference, ckdist_column_sums_step> {
  void run() {
    int64_t n, stride;
    const float* const x = r.floats(step.x, &n);
    float* const out = r.floats(step.out, &stride);
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      float *const sums = out + t * stride, *to = sums + 2 * step.first;
      std::fill(sums, sums + stride, 0.f);
      for (int64_t begin = 0; begin < n; begin += step.block, to += 2) {
        const float* const from = x + t * n + begin;
        const int64_t count = std::min<int64_t>(step.block, n - begin);
        for (int64_t i = 0; i < count; i++) to[0] += from[i];
        to[1] = r.kernels.elementwise.sum_squares(from, count);
      }
    }
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct CutRows : StepRun<Inference, ckdist_cut_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.sums); }

  void run() {
    int64_t n;
    const float* const x = r.floats(step.x, &n);
    float* const out = r.floats(step.out, &n);
    const Residual sums = {r, thread, -1, step.sums, -1, -1, 0.f, 1.f, reinterpret_cast<float*>(r.memory(thread))};
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      const float *const s = sums.read(t, t), *const end = s + r.value(step.sums).width;
      double sum = 0, squares = 0;
      for (const float* block = s; block < end; block += 2) sum += block[0], squares += block[1];
      const double mean = sum / step.columns, variance = std::max(squares / step.columns - mean * mean, 0.0);
      const float cut = float(mean + step.deviations * std::sqrt(variance));
      for (int64_t i = t * n; i < (t + 1) * n; i++) out[i] = std::max(x[i] - cut, 0.f);
    }
    r.meet(thread, index);
  }
};

const RegisteredKind<ColumnSums> kSums(ckdist_step_column_sums);
const RegisteredKind<CutRows> kCut(ckdist_step_cut_rows);

}  // namespace
}  // namespace ckdist
