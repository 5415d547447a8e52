// Receives the rows of the previous pipeline stage, and sends rows to the next one.
//
// Each rank of a stage sends its part of the rows to the rank at the same position in the next stage.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct Recv : StepRun<Inference, ckdist_recv_step> {
  void run() {
    int64_t width;
    float* const out = r.floats(step.out, &width);  // (tokens, hidden)
    const Range own = r.stage_rows(), all = r.rows_of(thread, r.local_tokens);
    for (int64_t row = all.begin; row < all.end; row++)
      if (row < own.begin || row >= own.end) std::fill(out + row * width, out + (row + 1) * width, 0.f);
    r.meet(thread, index, true,
           [&](Idle) { r.receive_rows(out + own.begin * width, (own.end - own.begin) * width, index); });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct Send : StepRun<Inference, ckdist_send_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }

  void run() {
    const Residual residual = Residual::of(r, thread, step, reinterpret_cast<float*>(r.memory(thread)));
    const int64_t width = r.value(step.y).width;
    const Range own = r.stage_rows();
    const Range part = r.rows_of(thread, own.end - own.begin);
    for (int64_t row = part.begin; row < part.end; row++) {
      const float* const s = residual.read(own.begin + row, own.begin + row);
      std::copy(s, s + width, r.outgoing() + row * width);
    }
    r.meet(thread, index, true, [&](Idle) {
      r.send_rows((own.end - own.begin) * width);
      r.end_batch(0, index);
    });
  }
};

const RegisteredKind<Recv> kRecv(ckdist_step_recv);
const RegisteredKind<Send> kSend(ckdist_step_send);

}  // namespace
}  // namespace ckdist
