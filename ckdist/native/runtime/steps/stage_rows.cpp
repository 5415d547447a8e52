// Rows that stages of a training exchange: activations forward, their gradients back.
//
// Each of the ranks that share a stage's tensors exchanges its share of the rows with the rank in its place in the
// other stage.
#include <algorithm>

#include "runtime/training.h"

namespace ckdist {
namespace {

struct RecvRows : TrainingRun<ckdist_recv_rows_step> {
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return r.program.max_tokens * r.width(step.out) * 4;
  }

  void run() {
    const int64_t width = r.width(step.out);
    const auto [begin, end] = r.own_rows(step.shared);
    float* const rows = reinterpret_cast<float*>(r.workspace());
    r.meet(thread, index, true, [&](Idle) { r.receive(step.peer, step.tag, rows, (end - begin) * width); });
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
    r.meet(thread, index, true, [&](Idle) { r.send(step.peer, step.tag, (end - begin) * width); });
  }
};

const RegisteredKind<RecvRows> kRecvRows(ckdist_step_recv_rows);
const RegisteredKind<SendRows> kSendRows(ckdist_step_send_rows);

}  // namespace
}  // namespace ckdist
