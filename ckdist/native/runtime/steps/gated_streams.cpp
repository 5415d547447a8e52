// Streams of hidden states that gates of low rank read, and that each part of a layer writes to. A thread computes
// whole streams of a token, or chunks of columns, so the bits do not depend on the threads.
#include "runtime/scalars.h"
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

constexpr int64_t kGateColumns = 256;  // columns

// Steps whose items are the streams of a token, or chunks of its columns.
template <class Run, class Fields>
struct StreamsRun : Carved<Run, InferenceRun<Fields>> {
  float* row(int32_t value, int64_t t, int64_t first = 0) const { return this->r.floats(value).row(t) + first; }
  // Calls visit(token, part) for this thread's items, if a token has `each` of them.
  template <class Visit>
  void each_part(int64_t each, Visit&& visit) const {
    this->each_own_item(this->r.local_tokens * each, [&](int64_t i) { visit(i / each, i % each); });
  }
};

struct AddStreams : StreamsRun<AddStreams, ckdist_add_streams_step> {
  static int64_t width(const Inference& r, const Fields& step) { return r.value(step.sum).width / step.streams; }
  static float* room(Carver& c, const Inference& r, const Fields& step) { return c.floats(width(r, step)); }

  void run() {
    each_part(step.streams, [&](int64_t t, int64_t i) { make(t, i); });
    r.finish(thread, index, step.normed < 0 ? step.sum : step.normed, r.local_tokens);
  }

  void make(int64_t t, int64_t i) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int64_t n = width(r, step);
    float* const sum = row(step.sum, t, i * n);
    if (step.y >= 0) {
      const bool wide = step.x >= 0 && step.coefs < 0;
      const float* const y = wide ? row(step.y, t, i * n) : Residual{r, thread, buffers(), step.y}.summed(t, t, {0, n});
      scaled(y, step.coefs < 0 ? 1.f : 2.f * sigmoid(row(step.coefs, t)[i]), n, sum);
      if (step.x >= 0) k.add(row(step.x, t, i * n), n, sum);
    }
    if (step.normed < 0) return;
    float* const normed = row(step.normed, t, i * n);
    k.rms_norm(sum, r.vector(step.norm) + i * n, step.eps, n, normed);
    if (step.factor != 1.f) scaled(normed, step.factor, n, normed);
  }
};

struct ReadStreams : StreamsRun<ReadStreams, ckdist_read_streams_step> {
  static float* room(Carver& c, const Inference&, const Fields&) { return c.floats(kGateColumns); }

  void run() {
    const int64_t width = r.value(step.out).width;
    float* const part = buffers();
    each_part((width + kGateColumns - 1) / kGateColumns, [&](int64_t t, int64_t chunk) {
      const int64_t first = chunk * kGateColumns, n = std::min(kGateColumns, width - first);
      float* const out = row(step.out, t, first);
      for (int64_t i = 0; i < step.streams; i++) {
        r.kernels.elementwise.gated(GateFunction::sigmoid, row(step.gates, t, i * width + first),
                                    row(step.x, t, i * width + first), n, i > 0 ? part : out);
        if (i > 0) r.kernels.elementwise.add(part, n, out);
      }
    });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct GateStreams : StreamsRun<GateStreams, ckdist_gate_streams_step> {
  struct Room {
    float *key, *query;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    return {c.floats(r.value(step.value).width), c.floats(r.value(step.value).width)};
  }

  void run() {
    each_part(step.streams, [&](int64_t t, int64_t i) { make(t, i); });
    r.finish(thread, index, step.rows, r.local_tokens);
  }

  void make(int64_t t, int64_t i) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int64_t n = r.value(step.value).width, first = i * n;
    const auto [key, query] = buffers();
    const float* const x = row(step.x, t, first);
    k.rms_norm(row(step.key, t, first), r.vector(step.key_norm) + first, step.eps, n, key);
    k.rms_norm(x, r.vector(step.query_norm) + first, step.eps, n, query);
    const float score = r.kernels.row.dot(float_row(key), float_row(query), n) / std::sqrt(float(n));
    const float size = std::sqrt(std::max(std::fabs(score), 1e-6f));
    float *const sum = row(step.sum, t, first), *const rows = row(step.rows, t, first);
    scaled(row(step.value, t), sigmoid(score > 0.f ? size : score < 0.f ? -size : 0.f), n, sum);
    k.rms_norm(sum, r.vector(step.rows_norm) + first, step.eps, n, rows);
    k.add(x, n, sum);
  }
};

const RegisteredKind<AddStreams> kAddStreams(ckdist_step_add_streams);
const RegisteredKind<ReadStreams> kReadStreams(ckdist_step_read_streams);
const RegisteredKind<GateStreams> kGateStreams(ckdist_step_gate_streams);

}  // namespace
}  // namespace ckdist
