// The states of Mamba-1's channels, in groups of channels that one item updates; and the inputs that all groups share.
#include "runtime/steps/residual.h"
#include "runtime/steps/state_run.h"

namespace ckdist {
namespace {

struct SelectiveScan : InferenceRun<ckdist_selective_scan_step> {
  void run() { run_state_heads(*this); }

  void tile(const StateItem& item, int64_t done, int count, float* state) {
    const StateSlots::Layer& layer = item.layer;
    const int64_t n = layer.channels, from = int64_t{item.head} * n;
    const int rows = layer.key_width;
    const auto row = [&](int32_t value, int64_t token) { return r.floats(value).row(token); };
    ScanToken one{};
    one.skip = r.vector(step.skip) + from, one.dt_bias = r.vector(step.dt_bias) + from;
    one.a = layer.kernels[1].data() + from, one.stride = int64_t{layer.value_heads} * n;
    for (int t = 0; t < count; t++) {
      const int64_t token = item.first_token + done + t;
      one.x = row(step.x, token) + from, one.dt = row(step.dt, token) + from, one.z = row(step.z, token) + from;
      one.b = row(step.bc, token), one.c = one.b + rows;
      r.kernels.delta_rule.scan(one, rows, n, state_columns(layer.value_width), state, row(step.out, token) + from);
    }
  }

  void write_tail(const StateItem&, int64_t, float*) const {}  // the convolution's step has written it
};

struct ScanInputs : InferenceRun<ckdist_scan_inputs_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.x); }

  void run() {
    each_row(r.local_tokens, [&](int64_t t) { make_row(t); });
    r.finish(thread, index, step.low, r.local_tokens);
  }

  void make_row(int64_t token) {
    const float* const sums = Residual{r, thread, buffer(), step.x}.read(token);
    const int64_t rank = r.value(step.low).width, state = r.value(step.bc).width / 2;
    norm(sums, rank, step.low_norm, r.floats(step.low).row(token));
    float* const bc = r.floats(step.bc).row(token);
    norm(sums + rank, state, step.b_norm, bc);
    norm(sums + rank + state, state, step.c_norm, bc + state);
  }

  void norm(const float* x, int64_t n, int32_t weight, float* out) const {
    const float squares = step.eps > 0.f ? r.kernels.elementwise.sum_squares(x, n) : 0.f;
    const float by = step.eps > 0.f ? 1.f / std::sqrt(squares / float(n) + step.eps) : 1.f;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * by * (weight < 0 ? 1.f : r.vector(weight)[i]);
  }
};

const RegisteredKind<SelectiveScan> kSelectiveScan(ckdist_step_selective_scan);
const RegisteredKind<ScanInputs> kScanInputs(ckdist_step_scan_inputs);

}  // namespace
}  // namespace ckdist
