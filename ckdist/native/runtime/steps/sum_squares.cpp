// Sums of squares of every head, for norms over all heads of a token.
#include "runtime/inference.h"

namespace ckdist {
namespace {

struct SumSquares : StepRun<Inference, ckdist_sum_squares_step> {
  void run() {
    const ckdist_layer& a = r.program.layers[step.layer];
    const Inference::Layer& layer = r.layers[step.layer];
    const int64_t width = layer.cache.key_width, group = a.total_heads / a.total_kv_heads;
    int64_t q_stride, k_stride, stride;
    const float* const q = r.floats(step.q, &q_stride);  // (tokens, heads, key_width)
    const float* const k = r.floats(step.k, &k_stride);  // (tokens, kv_heads, key_width)
    float* const out = r.floats(step.out, &stride);      // (tokens, total_heads + total_kv_heads)
    const bool all = r.plan->tokens_sharded;             // this rank has all heads of its tokens
    const int64_t first = all ? 0 : a.first_head, heads = all ? a.total_heads : layer.heads();
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      float* const row = out + t * stride;
      std::fill(row, row + a.total_heads + a.total_kv_heads, 0.f);
      for (int64_t h = 0; h < heads; h++)
        row[first + h] = r.kernels.elementwise.sum_squares(q + t * q_stride + h * width, width);
      // If ranks share a kv-head, the rank with the first of its query heads computes it.
      const int64_t first_kv = first / group, last_kv = heads ? (first + heads - 1) / group + 1 : first_kv;
      for (int64_t h = first_kv; h < last_kv; h++)
        if (h * group >= first)
          row[a.total_heads + h] = r.kernels.elementwise.sum_squares(
              k + t * k_stride + (all ? a.key_places[h] : h - first_kv) * width, width);
    }
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

const RegisteredKind<SumSquares> kKind(ckdist_step_sum_squares);

}  // namespace
}  // namespace ckdist
