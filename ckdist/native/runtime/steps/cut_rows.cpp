// Rows cut at a number of standard deviations above their mean, and the sums that ranks exchange for it.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct ColumnSums : InferenceRun<ckdist_column_sums_step> {
  void run() {
    const FloatRows x = r.floats(step.x), out = r.floats(step.out);
    const int64_t width = r.value(step.x).width;
    each_row(r.local_tokens, [&](int64_t t) {
      float* to = out.row(t) + 2 * step.first;
      std::fill_n(out.row(t), r.value(step.out).width, 0.f);
      for (int64_t begin = 0; begin < width; begin += step.block, to += 2) {
        const float* const from = x.row(t) + begin;
        const int64_t count = std::min<int64_t>(step.block, width - begin);
        for (int64_t i = 0; i < count; i++) to[0] += from[i];
        to[1] = r.kernels.elementwise.sum_squares(from, count);
      }
    });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct CutRows : InferenceRun<ckdist_cut_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.sums); }

  void run() {
    const FloatRows x = r.floats(step.x), out = r.floats(step.out);
    const Residual sums = {r, thread, buffer(), step.sums};
    each_row(r.local_tokens, [&](int64_t t) {
      const float *const s = sums.read(t), *const end = s + r.value(step.sums).width;
      double sum = 0, squares = 0;
      for (const float* block = s; block < end; block += 2) sum += block[0], squares += block[1];
      const double mean = sum / step.columns, variance = std::max(squares / step.columns - mean * mean, 0.0);
      const float cut = float(mean + step.deviations * std::sqrt(variance));
      for (int64_t i = 0; i < r.value(step.out).width; i++) out.row(t)[i] = std::max(x.row(t)[i] - cut, 0.f);
    });
    r.meet(thread, index);
  }
};

const RegisteredKind<ColumnSums> kColumnSums(ckdist_step_column_sums);
const RegisteredKind<CutRows> kCutRows(ckdist_step_cut_rows);

}  // namespace
}  // namespace ckdist
