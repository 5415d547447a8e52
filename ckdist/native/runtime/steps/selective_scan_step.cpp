// The states of Mamba-1's channels, in groups of channels that one item updates.
#include <cmath>

#include "kernels/delta_rule.h"
#include "runtime/steps/carved.h"
#include "runtime/steps/state_run.h"

namespace ckdist {
namespace {

struct SelectiveScan : Carved<SelectiveScan, StepRun<Inference, ckdist_selective_scan_step>> {
  // Buffers of one thread: b and c of a token, a row of `low`, zeros for channels.
  struct Room {
    float *bc, *low, *zeros;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    return {c.floats(r.value(step.bc).width), c.floats(step.low < 0 ? 0 : r.value(step.low).width),
            c.floats(r.states.layers[step.layer].channels)};
  }
  float* zeros() const { return buffers().zeros; }

  void run() { run_state_heads(*this); }

  // A token's row of a value that ranks may have summands of.
  const float* summed(int32_t value, int64_t token, float* sums) const {
    const ckdist_value& v = r.value(value);
    const float* parts[kMaxRanks];
    int64_t stride;
    int count = 1;
    if (v.place == ckdist_place_slot) count = r.ranks->summands(int(v.offset), parts);
    else parts[0] = r.floats(value, &stride);
    for (int p = 0; p < count; p++) parts[p] += token * v.width;
    r.kernels.elementwise.sum_parts(nullptr, parts, count, v.width, sums);
    return sums;
  }

  float inverse_rms(const float* x, int64_t n) const {
    return 1.f / std::sqrt(r.kernels.elementwise.sum_squares(x, n) / float(n) + step.eps);
  }
  void norm(float* x, int64_t n, int32_t weight) const {
    const float by = inverse_rms(x, n);
    for (int64_t i = 0; i < n; i++) x[i] *= weight < 0 ? by : by * r.vector(weight)[i];
  }

  void tile(const StateItem& item, int64_t done, int count, float* state) {
    const StateSlots::Layer& layer = item.layer;
    const Room here = buffers();
    const int64_t n = layer.channels, from = int64_t{item.head} * n;
    const int rows = layer.key_width;
    ScanToken one{};
    one.b = here.bc, one.c = here.bc + rows;
    one.skip = r.vector(step.skip) + from, one.dt_bias = r.vector(step.dt_bias) + from;
    one.a = layer.kernels[1].data() + from, one.stride = int64_t{layer.value_heads} * n;
    int64_t stride;
    const auto row = [&](int32_t value, int64_t token) {
      float* const at = r.floats(value, &stride);
      return at + token * stride + from;
    };
    for (int t = 0; t < count; t++) {
      const int64_t token = item.first_token + done + t;
      summed(step.bc, token, here.bc);
      if (step.eps > 0.f) norm(here.bc, rows, step.b_norm), norm(here.bc + rows, rows, step.c_norm);
      one.dt_scale = 1.f;
      if (step.low >= 0)
        one.dt_scale = inverse_rms(summed(step.low, token, here.low), r.value(step.low).width);
      one.x = row(step.x, token), one.dt = row(step.dt, token), one.z = row(step.z, token);
      r.kernels.delta_rule.scan(one, rows, n, state_columns(layer.value_width), state, row(step.out, token));
    }
  }

  void write_tail(const StateItem&, int64_t, float*) const {}  // the convolution's step has written it
};

const RegisteredKind<SelectiveScan> kKind(ckdist_step_selective_scan);

}  // namespace
}  // namespace ckdist
