// Rows that pipeline stages exchange in training: activations forward, their gradients backward.
//
// Each of the ranks that share a stage's tensors exchanges its part of the rows with the rank at the same position in
// the other stage. If there is a tally of experts, it follows the rows.
#include <algorithm>

#include "runtime/training.h"

namespace ckdist {
namespace {

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

const RegisteredKind<RecvRows> kRecvRows(ckdist_step_recv_rows);
const RegisteredKind<SendRows> kSendRows(ckdist_step_send_rows);

}  // namespace
}  // namespace ckdist
