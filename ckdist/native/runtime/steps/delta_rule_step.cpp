// Linear attention (gated delta rule): short convolutions, gates and norms of each value head, and updates of its
// state.
#include "kernels/delta_rule.h"

#include <cmath>
#include <cstring>

#include "runtime/inference.h"

namespace ckdist {
namespace {

constexpr int kTile = kBlockTokens;  // most tokens of a head at a time
constexpr int kMaxTaps = 16;

struct DeltaRule : StepRun<Inference, ckdist_delta_rule_step> {
  // Buffers of one thread for a tile of one head.
  struct Room {
    // q, k: (kTile, key_width). v, out: (kTile, value columns). beta: (kTile,). zeros: (channels,).
    // decay: (kTile,); with a factor per row (kTile, key_width), as decayed_q and decayed_k, which else are empty.
    float *q, *k, *v, *out, *decay, *beta, *zeros, *decayed_q, *decayed_k;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const StateSlots::Layer& layer = r.states.layers[step.layer];
    const int64_t keys = int64_t{kTile} * layer.key_width, values = kTile * state_columns(layer.value_width);
    const int64_t by_row = step.by_row ? keys : 0;
    return {c.floats(keys),
            c.floats(keys),
            c.floats(values),
            c.floats(values),
            c.floats(std::max<int64_t>(kTile, by_row)),
            c.floats(kTile),
            c.floats(layer.channels()),
            c.floats(by_row),
            c.floats(by_row)};
  }
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    Carver c;
    room(c, r, step);
    return c.used;
  }

  // One value head of one sequence's chunk.
  struct Item {
    const StateSlots::Layer& layer;
    Room room;
    int head;
    int64_t first_token, tokens, position;  // of the chunk: first token in the batch; first position
    const float* tail;                      // (taps - 1, channels): channels of the tokens before the chunk
    int64_t tail_stride;                    // 0: there is no earlier token; tail is one row of zeros

    int key_head() const { return layer.key_head_of[head]; }
  };

  // A token's row of one of the step's values.
  const float* row(int32_t value, int64_t token) const {
    if (step.exchanged) return r.peer_row(value, token);
    int64_t stride;
    const float* const at = r.floats(value, &stride);
    return at + token * stride;
  }

  void run() {
    const StateSlots::Layer& layer = r.states.layers[step.layer];
    const int64_t items = r.batch.sequences * layer.value_heads;
    if (r.batch.tokens != r.batch.sequences) {
      r.for_each_item(thread, index, items, [&](int64_t i) { run_head(layer, i); });
    } else if (items % r.active() == 0) {
      for (int64_t i = items * thread / r.active(); i < items * (thread + 1) / r.active(); i++) run_head(layer, i);
    } else {
      r.take_items(thread, index, items, [&](int64_t i) { run_head(layer, i); });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void run_head(const StateSlots::Layer& layer, int64_t i) {
    const int64_t sequence = i / layer.value_heads;
    const int head = int(i % layer.value_heads);
    const ckdist_state_slots& slots = r.batch.states[sequence];
    const BatchView::Chunk& chunk = r.batch.chunks[sequence];
    Carver c{r.memory(thread)};
    Item item{layer, room(c, r, step), head, 0, chunk.tokens, chunk.first_position, nullptr, layer.channels()};
    for (int64_t s = 0; s < sequence; s++) item.first_token += r.batch.chunks[s].tokens;
    float* const state = layer.head(slots.out, head);
    if (slots.in < 0) {
      std::memset(state, 0, layer.state_floats * sizeof(float));
      std::memset(item.room.zeros, 0, layer.channels() * sizeof(float));
      item.tail = item.room.zeros, item.tail_stride = 0;
    } else {
      const float* const before = layer.head(slots.in, head);
      item.tail = before + layer.state_floats;
      if (before != state) std::memcpy(state, before, layer.state_floats * sizeof(float));
    }
    if (layer.value_width % kStateColumns)
      std::memset(item.room.v, 0, kTile * state_columns(layer.value_width) * sizeof(float));
    const int64_t saved_tokens = slots.save < 0 ? 0 : slots.save_position - item.position;
    for (int64_t done = 0; done < item.tokens;) {
      const int64_t end = done < saved_tokens ? saved_tokens : item.tokens;
      const int64_t count = std::min<int64_t>(kTile, end - done);
      run_tile(item, done, int(count), state);
      done += count;
      if (done == saved_tokens) {
        float* const saved = layer.head(slots.save, head);
        std::memcpy(saved, state, layer.state_floats * sizeof(float));
        write_tail(item, done, layer.tail(saved));
      }
    }
    write_tail(item, item.tokens, layer.tail(state));
  }

  // Inputs of a part of the channels at token `t` of the chunk; a negative `t` is a token before the chunk. from: the
  // head's offset in the value's rows. column: the part's offset in a row of the tail.
  const float* seen(const Item& item, int64_t t, int32_t value, int64_t from, int64_t column) const {
    if (t >= 0) return row(value, item.first_token + t) + from;
    return item.tail + (item.layer.taps - 1 + t) * item.tail_stride + column;
  }

  // Runs tokens [done, done + count) of the chunk through the head's state.
  void run_tile(const Item& item, int64_t done, int count, float* state) {
    const StateSlots::Layer& layer = item.layer;
    const DeltaRuleKernel& kernel = r.kernels.delta_rule;
    const int keys = layer.key_width, values = layer.value_width, columns = int(state_columns(values));
    const float a_factor = std::exp(r.vector(step.a_log)[item.head]);
    for (int t = 0; t < count; t++) {
      float* const q = item.room.q + t * keys;
      float* const k = item.room.k + t * keys;
      convolve(item, done + t, 0, q), convolve(item, done + t, 1, k);
      convolve(item, done + t, 2, item.room.v + t * columns);
      kernel.l2_norm(q, step.l2_eps, step.scale, keys, q);
      kernel.l2_norm(k, step.l2_eps, 1.f, keys, k);
      const int64_t token = item.first_token + done + t;
      if (step.by_row) decay_rows(item, a_factor, token, t);
      else item.room.decay[t] = decay_of(a_factor, row(step.a, token)[item.head], item.head);
      item.room.beta[t] = 1.f / (1.f + std::exp(-row(step.b, token)[item.head]));
    }
    const Room& own = item.room;
    kernel.update({count, own.q, own.k, own.v, own.decay, own.beta, own.out, step.by_row ? own.decayed_q : nullptr,
                   step.by_row ? own.decayed_k : nullptr},
                  keys, columns, state);
    int64_t stride;
    float* const out = r.floats(step.out, &stride) + int64_t{item.head} * values;
    for (int t = 0; t < count; t++) {
      const int64_t token = item.first_token + done + t;
      float* const o = item.room.out + t * columns;
      const ElementwiseKernel& k = r.kernels.elementwise;
      k.rms_norm(o, r.vector(step.norm), step.eps, values, o);
      k.gated(GateFunction(step.gate), row(step.z, token) + int64_t{item.head} * values, o, values, out + token * stride);
      if (step.exchanged && r.rank_of(token) != r.ranks->local_rank)
        r.count_moved(thread, ((step.by_row ? 3 : 2) * keys + 2 * values + 2) * int64_t{sizeof(float)});
    }
  }

  // The factor of a head's state, or of the row of it that `a` and element `channel` of dt_bias are for.
  float decay_of(float a_factor, float a, int64_t channel) const {
    a += r.vector(step.dt_bias)[channel];
    if (step.lowest < 0.f) return std::exp(step.lowest / (1.f + std::exp(-a_factor * a)));
    const float softplus = std::max(a, 0.f) + std::log1p(std::exp(-std::abs(a)));
    return std::exp(-a_factor * softplus);
  }
  // The factors of the state's rows for token `t` of the tile, and its query and key times these.
  void decay_rows(const Item& item, float a_factor, int64_t token, int t) const {
    const int width = item.layer.key_width;
    const int64_t first = int64_t{item.head} * width, to = int64_t{t} * width;
    const float* const a = row(step.a, token) + first;
    for (int i = 0; i < width; i++) {
      const float factor = item.room.decay[to + i] = decay_of(a_factor, a[i], first + i);
      item.room.decayed_q[to + i] = item.room.q[to + i] * factor;
      item.room.decayed_k[to + i] = item.room.k[to + i] * factor;
    }
  }

  // The short convolution of one part of a token's channels: 0 query, 1 key, 2 value.
  void convolve(const Item& item, int64_t t, int part, float* out) const {
    const StateSlots::Layer& layer = item.layer;
    const int64_t width = part < 2 ? layer.key_width : layer.value_width;
    const int64_t from = (part < 2 ? item.key_head() : item.head) * width;
    const float* rows[kMaxTaps];
    for (int i = 0; i < layer.taps; i++)
      rows[i] = seen(item, t - layer.taps + 1 + i,
                     part == 0   ? step.q
                     : part == 1 ? step.k
                                 : step.v,
                     from, int64_t{part} * layer.key_width);
    const std::vector<float>& taps = layer.kernels[part];
    r.kernels.delta_rule.short_conv(rows, taps.data() + from, int64_t(taps.size()) / layer.taps, layer.taps, width,
                                    out);
  }

  // Writes the tail after the chunk's first `done` tokens: the channels of the last taps - 1 tokens.
  void write_tail(const Item& item, int64_t done, float* tail) const {
    const StateSlots::Layer& layer = item.layer;
    for (int i = 0; i < layer.taps - 1; i++) {
      const int64_t t = done - layer.taps + 1 + i;
      float* const to = tail + int64_t{i} * layer.channels();
      for (int part = 0; part < 3; part++) {
        const int64_t width = part < 2 ? layer.key_width : layer.value_width, column = int64_t{part} * layer.key_width;
        const float* const from = seen(item, t,
                                       part == 0   ? step.q
                                       : part == 1 ? step.k
                                                   : step.v,
                                       (part < 2 ? item.key_head() : item.head) * width, column);
        std::memmove(to + column, from, width * sizeof(float));
      }
    }
  }
};

const RegisteredKind<DeltaRule> kKind(ckdist_step_delta_rule);

}  // namespace
}  // namespace ckdist
