// Linear attention by the gated delta rule. Yang et al. 2024, arXiv:2412.06464.
//
// A token's update of the state is written as one pass over it, which also makes what the next token asks of it: a
// state is read and written once per token, from the L1 cache. Every sum's order depends on the head's width alone, so
// a token has the same bits however tokens are divided over calls.
#pragma once
#include <cstdint>

namespace ckdist {

// Consecutive tokens of one head.
struct DeltaTokens {
  int count;
  const float* q;      // (count, key_width), what is wanted of the state
  const float* k;      // (count, key_width)
  const float* v;      // (count, columns)
  const float* decay;  // (count,) by which the state is multiplied
  const float* beta;   // (count,) how much of a new value it takes
  float* out;          // (count, columns)
};

struct DeltaRuleKernel {
  // out[c] = silu(sum over i of taps[i * stride + c] * rows[i][c]), the oldest row first.
  void (*short_conv)(const float* const* rows, const float* taps, int64_t stride, int tap_count, int64_t n, float* out);
  // out[i] = x[i] * scale / sqrt(sum of x^2 + eps). out may be x.
  void (*l2_norm)(const float* x, float eps, float scale, int64_t n, float* out);
  // For each token: S = decay S; S = S + k beta (v - k S); out = q S. state: (columns / kStateColumns, key_width,
  // kStateColumns); columns: whole multiples of kStateColumns.
  void (*update)(const DeltaTokens& tokens, int key_width, int columns, float* state);
};

constexpr int kStateColumns = 32;
constexpr int64_t state_columns(int64_t value_width) {
  return (value_width + kStateColumns - 1) / kStateColumns * kStateColumns;
}

}  // namespace ckdist
