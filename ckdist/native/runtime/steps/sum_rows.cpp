// Rows of a sum that later steps read: factor * scalar * (x + post_factor * rms_norm(y)).
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct SumRows : StepRun<Inference, ckdist_sum_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }

  void run() {
    const Residual residual = Residual::of(r, thread, step, reinterpret_cast<float*>(r.memory(thread)));
    int64_t stride;
    float* const out = r.floats(step.out, &stride);
    const Range own = r.rows_of(thread, r.rows(step.step));
    for (int64_t row = own.begin; row < own.end; row++) {
      const float* const s = residual.read(row, r.token_row(step.step, row));
      scaled(s, step.factor, stride, out + (r.first_row(step.step) + row) * stride);
    }
    r.meet(thread, index);
  }
};

const RegisteredKind<SumRows> kKind(ckdist_step_sum_rows);

}  // namespace
}  // namespace ckdist
