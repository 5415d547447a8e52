// Receives the rows of the previous pipeline stage, and sends rows to the next one.
//
// Each rank of a stage sends its part of the rows to the rank at the same position in the next stage.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct Recv : InferenceRun<ckdist_recv_step> {
  void run() {
    const FloatRows out = r.floats(step.out);  // (tokens, hidden)
    const Range own = r.stage_rows();
    each_row(r.local_tokens, [&](int64_t row) {
      if (row < own.begin || row >= own.end) std::fill_n(out.row(row), out.stride, 0.f);
    });
    r.meet(thread, index, true,
           [&](Idle) { r.receive_rows(out.row(own.begin), (own.end - own.begin) * out.stride, index); });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct Send : ResidualRun<ckdist_send_step> {
  void run() {
    const Residual rows = residual();
    const Range own = r.stage_rows();
    each_row(own.end - own.begin,
             [&](int64_t row) { std::copy_n(rows.read(own.begin + row), width(), r.outgoing() + row * width()); });
    r.meet(thread, index, true, [&](Idle) {
      r.send_rows((own.end - own.begin) * width());
      r.end_batch(0, index);
    });
  }
};

const RegisteredKind<Recv> kRecv(ckdist_step_recv);
const RegisteredKind<Send> kSend(ckdist_step_send);

}  // namespace
}  // namespace ckdist
