// The states of Mamba-1's channels, in groups of channels that one item updates; and the inputs that all groups share.
#include <cmath>

#include "kernels/delta_rule.h"
#include "runtime/steps/carved.h"
#include "runtime/steps/state_run.h"

namespace ckdist {
namespace {

struct SelectiveScan : Carved<SelectiveScan, StepRun<Inference, ckdist_selective_scan_step>> {
  struct Room {
    float* zeros;  // (channels,)
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    return {c.floats(r.states.layers[step.layer].channels)};
  }
  float* zeros() const { return buffers().zeros; }

  void run() { run_state_heads(*this); }

  void tile(const StateItem& item, int64_t done, int count, float* state) {
    const StateSlots::Layer& layer = item.layer;
    const int64_t n = layer.channels, from = int64_t{item.head} * n;
    const int rows = layer.key_width;
    const auto row = [&](int32_t value, int64_t token) {
      int64_t stride;
      float* const first = r.floats(value, &stride);
      return first + token * stride;
    };
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

struct ScanInputs : StepRun<Inference, ckdist_scan_inputs_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    return r.value(step.x).width * int64_t{sizeof(float)};
  }

  void run() {
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) make_row(t);
    r.finish(thread, index, step.low, r.local_tokens);
  }

  void make_row(int64_t token) {
    const ckdist_value& v = r.value(step.x);
    const float* parts[kMaxRanks];
    int64_t stride;
    int count = 1;
    if (v.place == ckdist_place_slot) count = r.ranks->summands(int(v.offset), parts);
    else parts[0] = r.floats(step.x, &stride);
    for (int p = 0; p < count; p++) parts[p] += token * v.width;
    float* const sums = reinterpret_cast<float*>(r.memory(thread));
    r.kernels.elementwise.sum_parts(nullptr, parts, count, v.width, sums);
    const int64_t rank = r.value(step.low).width, state = r.value(step.bc).width / 2;
    float* const low = r.floats(step.low, &stride) + token * stride;
    norm(sums, rank, step.low_norm, low);
    float* const bc = r.floats(step.bc, &stride) + token * stride;
    norm(sums + rank, state, step.b_norm, bc);
    norm(sums + rank + state, state, step.c_norm, bc + state);
  }

  void norm(const float* x, int64_t n, int32_t weight, float* out) const {
    const float squares = step.eps > 0.f ? r.kernels.elementwise.sum_squares(x, n) : 0.f;
    const float by = step.eps > 0.f ? 1.f / std::sqrt(squares / float(n) + step.eps) : 1.f;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * by * (weight < 0 ? 1.f : r.vector(weight)[i]);
  }
};

const RegisteredKind<SelectiveScan> kScan(ckdist_step_selective_scan);
const RegisteredKind<ScanInputs> kInputs(ckdist_step_scan_inputs);

}  // namespace
}  // namespace ckdist
