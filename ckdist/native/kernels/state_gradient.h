// The backward pass of linear attention (kernels/delta_rule.h): of states, norms and short convolutions.
#pragma once
#include <cstdint>

#include "kernels/delta_rule.h"

namespace ckdist {

// Consecutive tokens of one head, and kStateColumns columns of its state.
struct StateTokens {
  int count, key_width;
  bool by_row, corrects;
  const float *q, *k;  // (count, key_width)
  const float* v;      // (count, kStateColumns)
  const float* decay;  // (count,), or (count, key_width) if `by_row`
  const float* beta;   // (count,)
};

// The gradients of some columns are added to these.
struct StateSums {
  float *q, *k;  // (count, key_width)
  float* decay;  // as StateTokens::decay
  float* beta;   // (count,)
};

struct StateGradientKernel {
  // states: (count + 1, key_width, kStateColumns). The first one is given, the others are those after each token.
  // taken: (count, kStateColumns), v - k (decay S), or v if it does not correct.
  void (*advance)(const StateTokens& tokens, float* states, float* taken);
  // From the last token to the first. d_out, dv: (count, kStateColumns). d_state: (key_width, kStateColumns), the
  // gradient of the state after the tokens, then of that before them.
  void (*back)(const StateTokens& tokens, const float* states, const float* taken, const float* d_out, float* d_state,
               const StateSums& sums, float* dv);
  // dx of l2_norm.
  void (*l2_norm)(const float* x, const float* dy, float eps, float scale, int64_t n, float* dx);
  // out[i] = dy[i] * silu'(x[i])
  void (*silu)(const float* x, const float* dy, int64_t n, float* out);
  // out[i] += x[i] * y[i]
  void (*add_products)(const float* x, const float* y, int64_t n, float* out);
};

}  // namespace ckdist
