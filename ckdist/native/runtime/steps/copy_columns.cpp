// Copies columns of rows, which a pipeline stage sends or receives side by side.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct CopyColumns : StepRun<Inference, ckdist_copy_columns_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }

  void run() {
    const Residual residual = Residual::of(r, thread, step, reinterpret_cast<float*>(r.memory(thread)));
    int64_t stride;
    float* const out = r.floats(step.out, &stride) + step.first_out;
    const int64_t n = std::min(r.value(step.y).width - step.first, stride - step.first_out);
    const Range columns = {step.first, step.first + n}, own = r.rows_of(thread, r.local_tokens);
    for (int64_t row = own.begin; row < own.end; row++) {
      const float* const s = residual.added(residual.summed(row, row, columns), row, row, columns);
      std::copy(s, s + n, out + row * stride);
    }
    r.meet(thread, index);
  }
};

const RegisteredKind<CopyColumns> kKind(ckdist_step_copy_columns);

}  // namespace
}  // namespace ckdist
