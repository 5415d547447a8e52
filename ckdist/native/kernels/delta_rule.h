// Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464) and by Mamba-2 (Dao & Gu 2024,
// arXiv:2405.21060), which has the same states.
//
// One pass over the state updates it for a token and also computes the products for the next token. So the state is
// read and written once per token, from the L1 cache. The order of every sum depends only on the head's width, so a
// token has the same bits for any division of tokens over calls.
#pragma once
#include <cstdint>

namespace ckdist {

// Consecutive tokens of one head.
struct DeltaTokens {
  int count;
  const float* q;      // (count, key_width), queries
  const float* k;      // (count, key_width)
  const float* v;      // (count, columns)
  const float* decay;  // (count,) factors of the state, or (count, key_width), each for a row of the state
  const float* beta;   // (count,) weights of the new values
  float* out;          // (count, columns)
  // With a factor per row: queries and keys times the factors, (count, key_width). Else null.
  const float *decayed_q, *decayed_k;
  bool corrects;  // delta rule; else Mamba-2
};

// One token of consecutive channels of Mamba-1 (Gu & Dao 2023, arXiv:2312.00752), n for each.
struct ScanToken {
  const float *x, *dt, *z;      // (n,)
  const float *b, *c;           // (rows,)
  const float *skip, *dt_bias;  // (n,)
  const float* a;               // (rows, stride): logarithms of the state's factors for d = 1
  int64_t stride;
};

// The factors of a state's rows for one token (Kimi delta attention, arXiv:2510.26692), n of them.
struct RowDecay {
  const float *a, *bias, *q, *k;
  float rate;   // exp(a_log) of the head
  float floor;  // < 0: factor = exp(floor sigmoid(rate (a + bias))); else exp(-rate softplus(a + bias))
  float *factor, *decayed_q, *decayed_k;  // the factors; q and k times these
};

struct DeltaRuleKernel {
  // out[c] = f(bias[c] + sum over i of taps[i * stride + c] * rows[i][c]), the oldest row first. f: SiLU if
  // `activates`. bias: null: 0.
  void (*short_conv)(const float* const* rows, const float* taps, int64_t stride, int tap_count, const float* bias,
                     bool activates, int64_t n, float* out);
  // out[i] = x[i] * scale / sqrt(sum of x^2 + eps). out may be x.
  void (*l2_norm)(const float* x, float eps, float scale, int64_t n, float* out);
  void (*decay_rows)(const RowDecay& decay, int64_t n);
  // For each token: S = decay S; S = S + k beta (v - k S), without k S unless it corrects; out = q S. state: (columns /
  // kStateColumns, key_width, kStateColumns); columns: whole multiples of kStateColumns.
  void (*update)(const DeltaTokens& tokens, int key_width, int columns, float* state);
  // d = softplus(dt + dt_bias); S = exp(a d) S + b d x; out = (c S + skip x) SiLU(z).
  // state: (rows, columns); the first n columns are used.
  void (*scan)(const ScanToken& token, int rows, int64_t n, int64_t columns, float* state, float* out);
};

constexpr int kStateColumns = 32;
constexpr int64_t state_columns(int64_t value_width) {
  return (value_width + kStateColumns - 1) / kStateColumns * kStateColumns;
}

}  // namespace ckdist
