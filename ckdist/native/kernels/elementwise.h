// Row-wise kernels: norms, rotation, activations, preparation of activations. Each handles whole rows of one token.
#pragma once
#include <cstdint>

#include "kernels/linear.h"

namespace ckdist {

enum class GateFunction : int32_t {
  silu = 0,
  gelu_tanh = 1,
  sigmoid = 2,
  clamped_swiglu = 3,
  gelu = 4,
  tanh = 5,
  relu = 6,
  relu2 = 7,  // max(x, 0)^2
  clamped_silu = 8,
  softplus = 9,
  limited_silu = 10,  // of the low byte; above it is a limit in sixteenths: min(silu(x), limit)
  situ = 11,
  identity = 12
};

struct ElementwiseKernel {
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]. out may be x. Zhang & Sennrich 2019, arXiv:1910.07467.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out[i] = sum over parts of part[p][i], in the order of p; x[i] is added first if x is not null. An all_reduce of
  // few bytes.
  void (*sum_parts)(const float* x, const float* const* parts, int count, int64_t n, float* out);
  // Rotates halves: (x[i], x[i + n/2]) by angle i of (cos, sin), i < n/2. out may be x. Su et al. 2021,
  // arXiv:2104.09864.
  void (*rope)(const float* x, const float* cos, const float* sin, int64_t n, float* out);
  // Rotates neighbours: (x[2 i], x[2 i + 1]).
  void (*rope_pairs)(const float* x, const float* cos, const float* sin, int64_t n, float* out);
  // Sum of x[i]^2, in an order that depends only on n.
  float (*sum_squares)(const float* x, int64_t n);
  // out[i] = x[i] * factor * weight[i]. out may be x.
  void (*scale_weighted)(const float* x, float factor, const float* weight, int64_t n, float* out);
  // out[i] = f(gate[i]) * up[i]; clamped_*, limited_silu and situ: see isa/gate.h. out may be gate.
  void (*gated)(GateFunction function, const float* gate, const float* up, int64_t n, float* out);
  // x[i] = f(x[i])
  void (*activate)(GateFunction function, float* x, int64_t n);
  // out[i] = (x[i] - mean) / sqrt(variance + eps) * weight[i] (+ bias[i], unless null). out may be x. Ba et al. 2016,
  // arXiv:1607.06450.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
  // x[i] = cap * tanh(x[i] / cap)
  void (*soft_cap)(float* x, float cap, int64_t n);
  // Writes one ActivationRow from `n` floats, which are columns [lead, lead + n) of `cols` columns. Other columns and
  // the padding are zeros.
  void (*prepare)(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);
  // The same row of bfloat16 in strips. `row`: its first columns (ActivationRow::strip_offset).
  void (*prepare_in_strip)(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);
  // out[i] += x[i]
  void (*add)(const float* x, int64_t n, float* out);
  // out[i] += factor * x[i]
  void (*add_scaled)(const float* x, float factor, int64_t n, float* out);

  // Reductions of a row of logits. Maxima are strided, so that no operation crosses lanes: of n numbers, maximum 16 s +
  // l is that of x[kMaxSpan s + 16 i + l] over i < kMaxSpan / 16. Writes max_count(n) maxima. Returns false if any
  // number is NaN or infinite.
  bool (*maxima)(const float* x, int64_t n, float* out);
  // The same for `kept`: x[i] if bit i % 32 of allowed[i / 32] is set, else `removed`. kept may be x.
  bool (*maxima_allowed)(const float* x, const uint32_t* allowed, float removed, int64_t n, float* kept, float* out);
  // Sum of exp((x[i] - shift) * scale) over n. The terms are written to `out` if it is not null.
  double (*sum_exp)(const float* x, int64_t n, float shift, float scale, float* out);
  // Sum of terms[i] over all i < n with x[i] >= `threshold`.
  double (*sum_at_least)(const float* x, const float* terms, int64_t n, float threshold);
};

constexpr int64_t kMaxSpan = 1024;
constexpr int64_t max_count(int64_t n) { return (n + kMaxSpan - 1) / kMaxSpan * 16; }

}  // namespace ckdist
