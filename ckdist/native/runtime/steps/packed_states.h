// The tokens' rows that the states of heads read in training (gated delta rule, Mamba-2).
#pragma once
#include "runtime/scalars.h"
#include "runtime/training.h"

namespace ckdist {

// Tokens of one head of a sequence: rows that kernels read.
struct StateRows {
  float *q, *k;         // (tokens, key_width): normed, of the head's key head
  float *decay, *beta;  // (tokens, factors), (tokens,)

  static StateRows carve(Carver& c, int64_t tokens, int64_t key_width, int64_t factors) {
    return {c.floats(tokens * key_width), c.floats(tokens * key_width), c.floats(tokens * factors), c.floats(tokens)};
  }
};

// Sizes of a step's heads, and its inputs. `Fields` has the fields of ckdist_delta_packed_step.
template <class Fields>
struct PackedStates {
  const Training& r;
  const Fields& step;

  int64_t key_width() const { return r.width(step.q) / step.key_heads; }
  int64_t value_width() const { return r.width(step.v) / step.value_heads; }
  int64_t columns() const { return state_columns(value_width()); }
  int64_t factors() const { return step.by_row ? key_width() : 1; }  // of a state, for a token
  int64_t group() const { return step.value_heads / step.key_heads; }
  int64_t value_head(int64_t key_head, int64_t i) const {
    return step.tiled ? key_head + i * step.key_heads : key_head * group() + i;
  }
  int64_t first(int64_t sequence) const { return r.batch.starts[size_t(sequence)]; }
  int64_t tokens(int64_t sequence) const { return r.batch.starts[size_t(sequence) + 1] - first(sequence); }
  int64_t sequences() const { return int64_t(r.batch.starts.size()) - 1; }

  // Queries and keys of a key head, for all tokens of a sequence.
  void read_keys(int64_t sequence, int64_t head, const StateRows& rows) const {
    const int64_t n = key_width();
    for (int64_t t = 0; t < tokens(sequence); ++t) {
      float *const q = rows.q + t * n, *const k = rows.k + t * n;
      r.copy(step.q, first(sequence) + t, head * n, n, q), r.copy(step.k, first(sequence) + t, head * n, n, k);
      if (!step.corrects) continue;
      r.kernels.delta_rule.l2_norm(q, step.l2_eps, step.scale, n, q);
      r.kernels.delta_rule.l2_norm(k, step.l2_eps, 1.f, n, k);
    }
  }

  float rate(int64_t head) const { return std::exp(r.parameter(step.a_log)[head]); }

  // Factors of a value head's state, and weights of its new values. `room`: (factors,).
  void read_gates(int64_t sequence, int64_t head, const StateRows& rows, float* room) const {
    const int64_t n = factors();
    const float by = rate(head), *const bias = r.parameter(step.dt_bias) + head * n;
    for (int64_t t = 0; t < tokens(sequence); ++t) {
      r.copy(step.a, first(sequence) + t, head * n, n, room);
      float* const decay = rows.decay + t * n;
      if (!step.corrects) {
        rows.beta[t] = std::min(std::max(softplus(room[0] + bias[0]), step.dt_low), step.dt_high);
        decay[0] = std::exp(-by * rows.beta[t]);
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        const float a = room[i] + bias[i];
        decay[i] = std::exp(step.decay_floor < 0 ? step.decay_floor * sigmoid(by * a) : -by * softplus(a));
      }
      r.copy(step.b, first(sequence) + t, head, 1, room);
      rows.beta[t] = step.beta_scale * sigmoid(room[0]);
    }
  }

  // kStateColumns columns of a value head in some tokens, (count, kStateColumns), with zeros after its last one.
  void read_columns(int value, int64_t token, int64_t count, int64_t head, int64_t column, float* out) const {
    const int64_t n = std::min<int64_t>(kStateColumns, value_width() - column);
    for (int64_t t = 0; t < count; ++t) {
      float* const row = out + t * kStateColumns;
      r.copy(value, token + t, head * value_width() + column, n, row);
      std::fill(row + n, row + kStateColumns, 0.f);
    }
  }
};

}  // namespace ckdist
