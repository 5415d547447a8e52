// The norm over groups of consecutive elements of a row, and the sums of squares of heads that ranks exchange for
// norms.
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

// Sums of squares of every head of queries and keys, for norms over all heads of a token.
struct SumSquares : InferenceRun<ckdist_sum_squares_step> {
  void run() {
    const ckdist_layer& a = r.program.layers[step.layer];
    const Inference::Layer& layer = r.layers[step.layer];
    const int64_t width = layer.cache.key_width, group = a.total_heads / a.total_kv_heads;
    const FloatRows q = r.floats(step.q);      // (tokens, heads, key_width)
    const FloatRows k = r.floats(step.k);      // (tokens, kv_heads, key_width)
    const FloatRows out = r.floats(step.out);  // (tokens, total_heads + total_kv_heads)
    const bool all = r.plan->tokens_sharded;   // this rank has all heads of its tokens
    const int64_t first = all ? 0 : a.first_head, heads = all ? a.total_heads : layer.heads();
    each_row(r.local_tokens, [&](int64_t t) {
      float* const row = out.row(t);
      std::fill_n(row, a.total_heads + a.total_kv_heads, 0.f);
      for (int64_t h = 0; h < heads; h++)
        row[first + h] = r.kernels.elementwise.sum_squares(q.row(t) + h * width, width);
      // If ranks share a kv-head, the rank with the first of its query heads computes it.
      const int64_t first_kv = first / group, last_kv = heads ? (first + heads - 1) / group + 1 : first_kv;
      for (int64_t h = first_kv; h < last_kv; h++)
        if (h * group >= first)
          row[a.total_heads + h] =
              r.kernels.elementwise.sum_squares(k.row(t) + (all ? a.key_places[h] : h - first_kv) * width, width);
    });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct HeadSquares : InferenceRun<ckdist_head_squares_step> {
  void run() {
    const FloatRows x = r.floats(step.x);      // (tokens, local heads * head_width)
    const FloatRows out = r.floats(step.out);  // (tokens, heads)
    each_row(r.local_tokens, [&](int64_t t) {
      std::fill_n(out.row(t), step.heads, 0.f);
      for (int64_t h = 0; h < r.value(step.x).width / step.head_width; h++)
        out.row(t)[step.first_head + h] =
            r.kernels.elementwise.sum_squares(x.row(t) + h * step.head_width, step.head_width);
    });
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

struct GroupNorm : InferenceRun<ckdist_group_norm_step> {
  // Buffers of one thread: the squares of a token's heads, and the heads if they lie in several slots.
  static int64_t thread_bytes(const Inference&, const Fields& step) {
    return step.heads * (1 + (step.parts ? step.head_width : 0)) * int64_t{sizeof(float)};
  }

  void run() {
    each_row(r.local_tokens, [&](int64_t t) { make_row(t); });
    r.finish(thread, index, step.out, r.local_tokens);
  }

  void make_row(int64_t token) {
    float* const out = r.floats(step.out).row(token);
    const float* const row = row_of(token);
    const float* const squares = squares_of(token, row);
    const int64_t heads = r.value(step.out).width / step.head_width, group = step.heads / step.groups;
    int32_t norm = step.norm;
    for (int64_t h = 0, part = 0, begin = 0; h < heads; h++) {
      for (; part < step.parts && h >= step.ends[part]; part++)
        norm += step.ends[part] > begin, begin = step.ends[part];
      const int64_t first = (step.first_head + h) / group * group, at = h * step.head_width;
      float sum = 0.f;
      for (int64_t i = 0; i < group; i++) sum += squares[first + i];
      const float by = 1.f / std::sqrt(sum / float(group * step.head_width) + step.eps);
      const float* const weight = r.vector(norm) + (h - begin) * step.head_width;
      r.kernels.elementwise.scale_weighted(row + at, by, weight, step.head_width, out + at);
    }
  }

  // A token's row of x.
  const float* row_of(int64_t token) const {
    if (step.parts == 0) return r.floats(step.x).row(token);
    float* const row = buffer() + step.heads;
    for (int64_t rank = 0, begin = 0; rank < step.parts; begin = step.ends[rank++]) {
      const int64_t width = (step.ends[rank] - begin) * step.head_width;
      const float* const from = r.peer_slot(r.value(step.x), int(rank)) + (r.first_token + token) * width;
      std::copy(from, from + width, row + begin * step.head_width);
      r.count_moved(thread, rank == r.ranks->local_rank ? 0 : width * int64_t{sizeof(float)});
    }
    return row;
  }

  // The sums of squares of a token's heads, of all ranks.
  const float* squares_of(int64_t token, const float* row) const {
    if (step.squares >= 0) return Residual{r, thread, buffer(), step.squares}.read(token);
    float* const sums = buffer();
    for (int64_t h = 0; h < step.heads; h++)
      sums[h] = r.kernels.elementwise.sum_squares(row + h * step.head_width, step.head_width);
    return sums;
  }
};

const RegisteredKind<SumSquares> kSumSquares(ckdist_step_sum_squares);
const RegisteredKind<HeadSquares> kHeadSquares(ckdist_step_head_squares);
const RegisteredKind<GroupNorm> kGroupNorm(ckdist_step_group_norm);

}  // namespace
}  // namespace ckdist
