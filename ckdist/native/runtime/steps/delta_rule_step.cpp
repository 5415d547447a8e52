// Linear attention (gated delta rule, Mamba-2): short convolutions, gates and norms of each value head, and updates of
// its state.
#include "runtime/scalars.h"
#include "runtime/steps/state_run.h"

namespace ckdist {
namespace {

struct DeltaRule : Carved<DeltaRule, InferenceRun<ckdist_delta_rule_step>> {
  // Buffers of one thread for a tile of one head.
  struct Room {
    // q, k: (kStateTile, key_width). v, out: (kStateTile, value columns). beta: (kStateTile,). gate: (value_width,).
    // decay: (kStateTile,); with a factor per row (kStateTile, key_width), as decayed_q and decayed_k, which else are
    // empty.
    float *q, *k, *v, *out, *decay, *beta, *gate, *decayed_q, *decayed_k;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const StateSlots::Layer& layer = r.states.layers[step.layer];
    const int64_t keys = int64_t{kStateTile} * layer.key_width, values = kStateTile * state_columns(layer.value_width);
    const int64_t by_row = step.by_row ? keys : 0;
    return {c.floats(keys),
            c.floats(keys),
            c.floats(values),
            c.floats(values),
            c.floats(std::max<int64_t>(kStateTile, by_row)),
            c.floats(kStateTile),
            c.floats(layer.value_width),
            c.floats(by_row),
            c.floats(by_row)};
  }

  void run() {
    const StateSlots::Layer& layer = r.states.layers[step.layer];
    if (layer.value_heads && layer.value_width % kStateColumns)
      std::memset(buffers().v, 0, kStateTile * state_columns(layer.value_width) * sizeof(float));
    run_state_heads(*this);
  }

  // A part of a token's channels: 0 query, 1 key, 2 value.
  int32_t value_of(int part) const { return part == 0 ? step.q : part == 1 ? step.k : step.v; }
  static int64_t width_of(const StateItem& item, int part) {
    return part < 2 ? item.layer.key_width : item.layer.value_width;
  }
  // The head's offset in the rows of a part.
  static int64_t from_of(const StateItem& item, int part) {
    return (part < 2 ? item.layer.key_head_of[item.head] : item.head) * width_of(item, part);
  }

  // Inputs of a part at token `t` of the chunk; a negative `t` is a token before the chunk.
  const float* seen(const StateItem& item, int64_t t, int part) const {
    if (t >= 0) return r.row_of(value_of(part), item.first_token + t) + from_of(item, part);
    return item.tail + (item.layer.taps - 1 + t) * item.tail_stride + int64_t{part} * item.layer.key_width;
  }

  void tile(const StateItem& item, int64_t done, int count, float* state) {
    const StateSlots::Layer& layer = item.layer;
    const DeltaRuleKernel& kernel = r.kernels.delta_rule;
    const Room here = buffers();
    const int keys = layer.key_width, values = layer.value_width, columns = int(state_columns(values));
    const float a_factor = std::exp(r.vector(step.a_log)[item.head]);
    const float* const bias = r.vector(step.dt_bias);
    for (int t = 0; t < count; t++) {
      float* const q = here.q + t * keys;
      float* const k = here.k + t * keys;
      convolve(item, done + t, 0, q), convolve(item, done + t, 1, k);
      convolve(item, done + t, 2, here.v + t * columns);
      const int64_t token = item.first_token + done + t;
      if (step.corrects) {
        kernel.l2_norm(q, step.l2_eps, step.scale, keys, q);
        kernel.l2_norm(k, step.l2_eps, 1.f, keys, k);
        if (step.by_row) decay_rows(item, here, a_factor, token, t);
        else here.decay[t] = std::exp(-a_factor * softplus(r.row_of(step.a, token)[item.head] + bias[item.head]));
        here.beta[t] = step.beta_scale / (1.f + std::exp(-r.row_of(step.b, token)[item.head]));
      } else {
        const float dt = softplus(r.row_of(step.a, token)[item.head] * step.dt_scale + bias[item.head]);
        here.beta[t] = std::min(std::max(dt, step.dt_low), step.dt_high);
        here.decay[t] = std::exp(-a_factor * here.beta[t]);
      }
    }
    kernel.update({count, here.q, here.k, here.v, here.decay, here.beta, here.out,
                   step.by_row ? here.decayed_q : nullptr, step.by_row ? here.decayed_k : nullptr, step.corrects != 0},
                  keys, columns, state);
    const FloatRows out = r.floats(step.out);
    for (int t = 0; t < count; t++) {
      const int64_t token = item.first_token + done + t;
      float* const o = here.out + t * columns;
      const ElementwiseKernel& k = r.kernels.elementwise;
      if (step.skip >= 0) k.add_scaled(here.v + t * columns, r.vector(step.skip)[item.head], values, o);
      if (step.norm >= 0) k.rms_norm(o, r.vector(step.norm), step.eps, values, o);
      const float* z = r.row_of(step.z, token) + int64_t{item.head} * values;
      if (step.gate_scale != 1.f) {
        for (int i = 0; i < values; i++) here.gate[i] = step.gate_scale * z[i];
        z = here.gate;
      }
      k.gated(GateFunction(step.gate), z, o, values, out.row(token) + int64_t{item.head} * values);
      if (step.exchanged && r.rank_of(token) != r.ranks->local_rank)
        r.count_moved(thread, ((step.by_row ? 3 : 2) * keys + 2 * values + 2) * int64_t{sizeof(float)});
    }
  }

  // The factors of the state's rows for token `t` of the tile, and its query and key times these.
  void decay_rows(const StateItem& item, const Room& here, float a_factor, int64_t token, int t) const {
    const int width = item.layer.key_width;
    const int64_t first = int64_t{item.head} * width, to = int64_t{t} * width;
    const float* const a = r.row_of(step.a, token) + first;
    r.kernels.delta_rule.decay_rows({a, r.vector(step.dt_bias) + first, here.q + to, here.k + to, a_factor,
                                     step.decay_floor, here.decay + to, here.decayed_q + to, here.decayed_k + to},
                                    width);
  }

  // The short convolution of one part of a token's channels.
  void convolve(const StateItem& item, int64_t t, int part, float* out) const {
    const StateSlots::Layer& layer = item.layer;
    const float* rows[kMaxTaps];
    for (int i = 0; i < layer.taps; i++) rows[i] = seen(item, t - layer.taps + 1 + i, part);
    const std::vector<float>& taps = layer.kernels[part];
    const int64_t from = from_of(item, part);
    const int32_t biases[] = {step.bias_q, step.bias_k, step.bias_v};
    r.kernels.delta_rule.short_conv(rows, taps.data() + from, int64_t(taps.size()) / layer.taps, layer.taps,
                                    biases[part] < 0 ? nullptr : r.vector(biases[part]) + from, true,
                                    width_of(item, part), out);
  }

  void write_tail(const StateItem& item, int64_t done, float* tail) const {
    const StateSlots::Layer& layer = item.layer;
    for (int i = 0; i < layer.taps - 1; i++)
      for (int part = 0; part < 3; part++)
        std::memmove(tail + int64_t{i} * layer.channels + int64_t{part} * layer.key_width,
                     seen(item, done - layer.taps + 1 + i, part), width_of(item, part) * sizeof(float));
  }
};

const RegisteredKind<DeltaRule> kDeltaRule(ckdist_step_delta_rule);

}  // namespace
}  // namespace ckdist
