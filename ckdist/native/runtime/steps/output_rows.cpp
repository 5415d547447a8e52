// The hidden states of the selected rows, for requests of embeddings instead of logits.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct OutputRows : StepRun<Inference, ckdist_output_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }

  void run() {
    const int64_t n = r.rows(step.step), width = r.value(step.y).width;
    float* const room = reinterpret_cast<float*>(r.memory(thread));
    const Residual residual = Residual::of(r, thread, step, room);
    int64_t stride;
    float* const out = r.floats(step.out, &stride);  // (selected, hidden)
    const Range own = r.rows_of(thread, n);
    for (int64_t row = own.begin; row < own.end; row++) {
      const float* const s = normed(r, step, residual.read(row, r.token_row(step.step, row)), width, room);
      std::copy(s, s + width, out + row * stride);
    }
    r.finish(thread, index, step.out, n);
  }
};

const RegisteredKind<OutputRows> kKind(ckdist_step_output_rows);

}  // namespace
}  // namespace ckdist
