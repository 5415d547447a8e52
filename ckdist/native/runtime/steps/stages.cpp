// Receives the rows of other pipeline stages, and sends rows to them: in serving rows of the residual stream; in
// training activations forward, and their gradients backward, with the tally of experts if there is one.
//
// Each rank of a stage exchanges its part of the rows with the rank at the same position in the other stage.
#include "runtime/steps/residual.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

struct Recv : InferenceRun<ckdist_recv_step> {
  void run() {
    const FloatRows out = r.floats(step.out);  // (tokens, hidden)
    const Range own = r.stage_rows();
    const int64_t width = r.value(step.out).width;  // rows lie side by side: no product writes them
    each_row(r.local_tokens, [&](int64_t row) {
      if (row < own.begin || row >= own.end) std::fill_n(out.row(row), width, 0.f);
    });
    r.meet(thread, index, true,
           [&](Idle) { r.receive_rows(out.row(own.begin), (own.end - own.begin) * width, index); });
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

int64_t tally_floats(const Training& r, int tally) { return tally < 0 ? 0 : r.width(tally); }

struct RecvRows : TrainingRun<ckdist_recv_rows_step> {
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return (r.program.max_tokens * r.width(step.out) + tally_floats(r, step.tally)) * 4;
  }

  void run() {
    const int64_t width = r.width(step.out);
    const auto [begin, end] = r.own_rows(step.shared);
    float* const rows = reinterpret_cast<float*>(r.workspace());  // (own rows, width), tally
    r.meet(thread, index, true, [&](Idle) {
      const int64_t floats = (end - begin) * width, tally = tally_floats(r, step.tally);
      r.receive(step.peer, step.tag, rows, floats + tally);
      if (tally > 0) std::copy_n(rows + floats, tally, r.floats(step.tally, 0));
    });
    each_token([&](int64_t t) {
      float* const out = r.floats(step.out, t);
      if (t >= begin && t < end) std::copy_n(rows + (t - begin) * width, width, out);
      else std::fill_n(out, width, 0.f);
      r.pad(step.out, t);
    });
  }
};

struct SendRows : TrainingRun<ckdist_send_rows_step> {
  void run() {
    const int64_t width = r.width(step.x);
    const auto [begin, end] = r.own_rows(step.shared);
    r.meet(thread, index, true, [&](Idle) { r.make_place(); });
    each_token([&](int64_t t) {
      if (t >= begin && t < end) std::copy_n(r.floats(step.x, t), width, r.outgoing() + (t - begin) * width);
    });
    r.meet(thread, index, true, [&](Idle) {
      const int64_t floats = (end - begin) * width, tally = tally_floats(r, step.tally);
      if (tally > 0) std::copy_n(r.floats(step.tally, 0), tally, r.outgoing() + floats);
      r.send(step.peer, step.tag, floats + tally);
    });
  }
};

const RegisteredKind<Recv> kRecv(ckdist_step_recv);
const RegisteredKind<Send> kSend(ckdist_step_send);
const RegisteredKind<RecvRows> kRecvRows(ckdist_step_recv_rows);
const RegisteredKind<SendRows> kSendRows(ckdist_step_send_rows);

}  // namespace
}  // namespace ckdist
