// A gated short convolution: out = c * conv(b * x), of LFM2; or SiLU(conv(x)), of Mamba-1.
#include "runtime/steps/state_run.h"

namespace ckdist {
namespace {

struct GatedConv : Carved<GatedConv, InferenceRun<ckdist_gated_conv_step>> {
  // Buffers of one thread: products b * x of a tile and of the tokens before it, (taps - 1 + kStateTile, channels);
  // products of one head's tokens before a tail, (taps - 1, channels).
  static float* room(Carver& c, const Inference& r, const Fields& step) {
    return c.floats(int64_t{kStateTile + kMaxTaps} * r.states.layers[step.layer].channels);
  }

  void run() { run_state_heads(*this); }

  // Writes b * x of token `t` of the chunk; a negative `t` is a token before the chunk.
  void product(const StateItem& item, int64_t t, float* out) const {
    const int64_t n = item.layer.channels, from = int64_t{item.head} * n;
    if (t < 0)
      return void(std::memmove(out, item.tail + (item.layer.taps - 1 + t) * item.tail_stride, n * sizeof(float)));
    const float* const x = r.row_of(step.x, item.first_token + t) + from;
    if (step.b < 0) return void(std::memcpy(out, x, n * sizeof(float)));
    const float* const b = r.row_of(step.b, item.first_token + t) + from;
    for (int64_t i = 0; i < n; i++) out[i] = b[i] * x[i];
  }

  void tile(const StateItem& item, int64_t done, int count, float*) {
    const StateSlots::Layer& layer = item.layer;
    const int64_t n = layer.channels, from = int64_t{item.head} * n;
    float* const products = buffers();
    for (int t = 0; t < layer.taps - 1 + count; t++) product(item, done - layer.taps + 1 + t, products + t * n);
    const std::vector<float>& taps = layer.kernels[0];
    const FloatRows out = r.floats(step.out);
    for (int t = 0; t < count; t++) {
      const int64_t token = item.first_token + done + t;
      const float* rows[kMaxTaps];
      for (int i = 0; i < layer.taps; i++) rows[i] = products + (t + i) * n;
      float* const o = out.row(token) + from;
      r.kernels.delta_rule.short_conv(rows, taps.data() + from, int64_t(taps.size()) / layer.taps, layer.taps,
                                      step.bias < 0 ? nullptr : r.vector(step.bias) + from, step.c < 0, n, o);
      if (step.c < 0) continue;
      const float* const c = r.row_of(step.c, token) + from;
      for (int64_t i = 0; i < n; i++) o[i] *= c[i];
      if (step.exchanged && r.rank_of(token) != r.ranks->local_rank)
        r.count_moved(thread, 3 * n * int64_t{sizeof(float)});
    }
  }

  void write_tail(const StateItem& item, int64_t done, float* tail) const {
    for (int i = 0; i < item.layer.taps - 1; i++)
      product(item, done - item.layer.taps + 1 + i, tail + int64_t{i} * item.layer.channels);
  }
};

const RegisteredKind<GatedConv> kGatedConv(ckdist_step_gated_conv);

}  // namespace
}  // namespace ckdist
