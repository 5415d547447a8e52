// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) over packed
// sequences, and their gradients. An item is a key head of a sequence, with the value heads that read it.
//
// The backward pass computes the states again, for kStateColumns of their columns at a time. It keeps those before each
// chunk of tokens, and within a chunk those after each token, which stay in the L2 cache.
#include "runtime/steps/packed_states.h"

namespace ckdist {
namespace {

constexpr int64_t kDeltaTokens = 32;  // tokens

struct DeltaPacked : Carved<DeltaPacked, TrainingRun<ckdist_delta_packed_step>> {
  using States = PackedStates<Fields>;
  struct Room {
    StateRows rows;
    float *decayed_q, *decayed_k;  // (tokens, key_width); by row only
    float *state, *v, *out;        // a head's state; (kDeltaTokens, columns)
    float* gates;
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const States of{r, step};
    const int64_t tokens = r.program.max_tokens, by_row = step.by_row ? tokens * of.key_width() : 0;
    return {StateRows::carve(c, tokens, of.key_width(), of.factors()),
            c.floats(by_row),
            c.floats(by_row),
            c.floats(of.key_width() * of.columns()),
            c.floats(kDeltaTokens * of.columns()),
            c.floats(kDeltaTokens * of.columns()),
            c.floats(of.factors())};
  }

  const States of{r, step};
  const Room own = buffers();

  void run() {
    parallel_for(of.sequences() * step.key_heads, [&](int64_t item) {
      const int64_t sequence = item / step.key_heads, key_head = item % step.key_heads;
      of.read_keys(sequence, key_head, own.rows);
      for (int64_t i = 0; i < of.group(); ++i) run_head(sequence, of.value_head(key_head, i));
    });
  }

  void run_head(int64_t sequence, int64_t head) {
    const int64_t keys = of.key_width(), columns = of.columns(), values = of.value_width(), all = of.tokens(sequence);
    of.read_gates(sequence, head, own.rows, own.gates);
    for (int64_t i = 0; step.by_row && i < all * keys; ++i) {
      own.decayed_q[i] = own.rows.decay[i] * own.rows.q[i];
      own.decayed_k[i] = own.rows.decay[i] * own.rows.k[i];
    }
    std::fill_n(own.state, keys * columns, 0.f);
    for (int64_t first = 0; first < all; first += kDeltaTokens) {
      const int64_t count = std::min(kDeltaTokens, all - first), token = of.first(sequence) + first;
      for (int64_t t = 0; t < count; ++t) {
        float* const v = own.v + t * columns;
        r.copy(step.v, token + t, head * values, values, v);
        std::fill(v + values, v + columns, 0.f);
      }
      r.kernels.delta_rule.update({int(count), own.rows.q + first * keys, own.rows.k + first * keys, own.v,
                                   own.rows.decay + first * of.factors(), own.rows.beta + first, own.out,
                                   step.by_row ? own.decayed_q + first * keys : nullptr,
                                   step.by_row ? own.decayed_k + first * keys : nullptr, step.corrects != 0},
                                  int(keys), int(columns), own.state);
      for (int64_t t = 0; t < count; ++t) {
        float* const out = own.out + t * columns;
        if (step.skip >= 0)
          r.kernels.elementwise.add_scaled(own.v + t * columns, r.parameter(step.skip)[head], values, out);
        r.store(step.out, token + t, head * values, out, values);
      }
    }
  }
};

struct DeltaGrad : Carved<DeltaGrad, TrainingRun<ckdist_delta_grad_step>> {
  using States = PackedStates<Fields>;
  struct Room {
    StateRows rows, sums;                // the gradients of `rows`
    float *kept, *states, *d_state;      // of kStateColumns: before each chunk; in a chunk; the gradient
    float *v, *taken, *d_out, *dv;       // (kDeltaTokens, kStateColumns)
    float *gates, *row, *skip, *result;  // (factors,), (key_width,), (tokens,), (factors or key_width,)
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const States of{r, step};
    const int64_t tokens = r.program.max_tokens, keys = of.key_width(), size = keys * kStateColumns;
    const int64_t part = kDeltaTokens * kStateColumns;
    const StateRows rows = StateRows::carve(c, tokens, keys, of.factors());
    const StateRows sums = StateRows::carve(c, tokens, keys, of.factors());
    return {rows,
            sums,
            c.floats(parts_of(tokens, kDeltaTokens) * size),
            c.floats((kDeltaTokens + 1) * size),
            c.floats(size),
            c.floats(part),
            c.floats(part),
            c.floats(part),
            c.floats(part),
            c.floats(of.factors()),
            c.floats(keys),
            c.floats(tokens),
            c.floats(keys)};
  }

  const States of{r, step};
  const Room own = buffers();

  void run() {
    parallel_for(of.sequences() * step.key_heads, [&](int64_t item) {
      const int64_t sequence = item / step.key_heads, key_head = item % step.key_heads;
      const int64_t floats = of.tokens(sequence) * of.key_width();
      of.read_keys(sequence, key_head, own.rows);
      std::fill_n(own.sums.q, floats, 0.f), std::fill_n(own.sums.k, floats, 0.f);
      for (int64_t i = 0; i < of.group(); ++i) run_head(sequence, of.value_head(key_head, i));
      store_keys(sequence, key_head);
    });
  }

  StateTokens tokens_of(int64_t first, int64_t count) const {
    const int64_t keys = of.key_width();
    return {int(count),
            int(keys),
            step.by_row != 0,
            step.corrects != 0,
            own.rows.q + first * keys,
            own.rows.k + first * keys,
            own.v,
            own.rows.decay + first * of.factors(),
            own.rows.beta + first};
  }

  void run_head(int64_t sequence, int64_t head) {
    const int64_t all = of.tokens(sequence);
    of.read_gates(sequence, head, own.rows, own.gates);
    std::fill_n(own.sums.decay, all * of.factors(), 0.f), std::fill_n(own.sums.beta, all, 0.f);
    std::fill_n(own.skip, all, 0.f);
    for (int64_t column = 0; column < of.value_width(); column += kStateColumns) run_columns(sequence, head, column);
    store_gates(sequence, head);
  }

  // Adds the gradients of kStateColumns columns of a head, and stores those of its values.
  void run_columns(int64_t sequence, int64_t head, int64_t column) {
    const StateGradientKernel& kernel = r.kernels.state_gradient;
    const int64_t all = of.tokens(sequence), start = of.first(sequence), keys = of.key_width();
    const int64_t size = keys * kStateColumns, count = parts_of(all, kDeltaTokens);
    const auto length = [&](int64_t chunk) { return std::min(kDeltaTokens, all - chunk * kDeltaTokens); };
    const auto advance = [&](int64_t chunk) {  // from states[0] on
      of.read_columns(step.v, start + chunk * kDeltaTokens, length(chunk), head, column, own.v);
      kernel.advance(tokens_of(chunk * kDeltaTokens, length(chunk)), own.states, own.taken);
    };
    std::fill_n(own.states, size, 0.f);
    for (int64_t chunk = 0; chunk < count; ++chunk) {
      std::copy_n(own.states, size, own.kept + chunk * size);
      if (chunk + 1 == count) break;  // the backward pass computes it
      advance(chunk);
      std::copy_n(own.states + length(chunk) * size, size, own.states);
    }
    std::fill_n(own.d_state, size, 0.f);
    const int64_t width = std::min<int64_t>(kStateColumns, of.value_width() - column);
    for (int64_t chunk = count - 1; chunk >= 0; --chunk) {
      const int64_t first = chunk * kDeltaTokens;
      std::copy_n(own.kept + chunk * size, size, own.states);
      advance(chunk);
      of.read_columns(step.d_out, start + first, length(chunk), head, column, own.d_out);
      const StateSums sums{own.sums.q + first * keys, own.sums.k + first * keys, own.sums.decay + first * of.factors(),
                           own.sums.beta + first};
      kernel.back(tokens_of(first, length(chunk)), own.states, own.taken, own.d_out, own.d_state, sums, own.dv);
      for (int64_t t = 0; t < length(chunk); ++t) {
        float *const dv = own.dv + t * kStateColumns, *const d_out = own.d_out + t * kStateColumns;
        if (step.skip >= 0) {
          for (int64_t i = 0; i < width; ++i) own.skip[first + t] += d_out[i] * own.v[t * kStateColumns + i];
          r.kernels.elementwise.add_scaled(d_out, r.parameter(step.skip)[head], width, dv);
        }
        r.store(step.dv, start + first + t, head * of.value_width() + column, dv, width);
      }
    }
  }

  // Stores the gradients of a head's gates, and the summands of its rate and its skip for each token.
  void store_gates(int64_t sequence, int64_t head) {
    const int64_t n = of.factors(), start = of.first(sequence);
    const float by = of.rate(head), *const bias = r.parameter(step.dt_bias) + head * n;
    for (int64_t t = 0; t < of.tokens(sequence); ++t) {
      const float *const decay = own.rows.decay + t * n, *const d_decay = own.sums.decay + t * n;
      float *const da = own.result, beta = own.rows.beta[t], d_beta = own.sums.beta[t], d_rate = 0;
      r.copy(step.a, start + t, head * n, n, own.gates);
      for (int64_t i = 0; i < n; ++i) {
        const float d_log = d_decay[i] * decay[i];  // of the decay's logarithm
        if (!step.corrects) {
          const float x = own.gates[i] + bias[i], dt = softplus(x);
          d_rate = -d_log * by * beta;
          const bool is_free = dt > step.dt_low && dt < step.dt_high;
          da[i] = is_free ? (d_beta - d_log * by) * sigmoid(x) : 0.f;
        } else if (step.decay_floor < 0) {
          const float x = own.gates[i] + bias[i], s = sigmoid(by * x);
          const float slope = d_log * step.decay_floor * s * (1 - s) * by;
          d_rate += slope * x, da[i] = slope;
        } else {
          const float x = own.gates[i] + bias[i];
          d_rate -= d_log * by * softplus(x), da[i] = -d_log * by * sigmoid(x);
        }
      }
      r.store(step.da, start + t, head * n, da, n);
      r.store(step.d_rate, start + t, head, &d_rate, 1);
      if (step.skip >= 0) r.store(step.d_skip, start + t, head, own.skip + t, 1);
      if (!step.corrects) continue;
      const float s = beta / step.beta_scale, db = d_beta * step.beta_scale * s * (1 - s);
      r.store(step.db, start + t, head, &db, 1);
    }
  }

  // Stores the gradients of a key head's queries and keys.
  void store_keys(int64_t sequence, int64_t key_head) {
    const int64_t n = of.key_width(), start = of.first(sequence);
    const auto store = [&](int32_t x, int32_t dx, const float* sum, float scale, int64_t t) {
      if (step.corrects) {
        r.copy(x, start + t, key_head * n, n, own.row);
        r.kernels.state_gradient.l2_norm(own.row, sum, step.l2_eps, scale, n, own.result);
        sum = own.result;
      }
      r.store(dx, start + t, key_head * n, sum, n);
    };
    for (int64_t t = 0; t < of.tokens(sequence); ++t) {
      store(step.q, step.dq, own.sums.q + t * n, step.scale, t);
      store(step.k, step.dk, own.sums.k + t * n, 1.f, t);
    }
  }
};

const RegisteredKind<DeltaPacked> kDeltaPacked(ckdist_step_delta_packed);
const RegisteredKind<DeltaGrad> kDeltaGrad(ckdist_step_delta_grad);

}  // namespace
}  // namespace ckdist
