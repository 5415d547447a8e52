// Writes the last hidden states of the selected tokens to memory that all ranks read, if tokens are sharded. Rows have
// the order of the batch's selected tokens, so that every rank finds a row without knowing its owner.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct GatherRows : StepRun<Inference, ckdist_gather_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }

  void run() {
    int64_t stride;
    float* const out = r.floats(step.out, &stride);  // (selected, hidden)
    const Residual residual = Residual::of(r, thread, step, reinterpret_cast<float*>(r.memory(thread)));
    for (int64_t o = thread; o < r.batch.selected; o += r.active()) {
      const int64_t row = r.batch.selected_tokens[o] - r.first_token;
      if (row < 0 || row >= r.local_tokens) continue;
      const float* const s = residual.read(o - r.first_selected, row);
      std::copy(s, s + stride, out + o * stride);
    }
    r.finish(thread, index, step.out, r.batch.selected);
  }
};

const RegisteredKind<GatherRows> kKind(ckdist_step_gather_rows);

}  // namespace
}  // namespace ckdist
