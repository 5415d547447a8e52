// Rows of the residual stream: x + factor * rms_norm(sum of the ranks' summands), and their norms.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

// Writes x * factor to `row`, which may be x.
inline const float* scaled(const float* x, float factor, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i++) row[i] = x[i] * factor;
  return row;
}

// factor * norm(s) of n floats, with the norm of the step. Returns `s` if nothing changes, else `row`, which may be s.
template <class Fields>
const float* normed(const Inference& r, const Fields& step, const float* s, int64_t n, float* row) {
  const ElementwiseKernel& k = r.kernels.elementwise;
  if (step.norm >= 0 && step.centred) {
    k.layer_norm(s, r.vector(step.norm), step.norm_bias < 0 ? nullptr : r.vector(step.norm_bias), step.eps, n, row);
    s = row;
  } else if (step.norm >= 0) {
    k.rms_norm(s, r.vector(step.norm), step.eps, n, row), s = row;
  }
  return step.factor != 1.f ? scaled(s, step.factor, n, row) : s;
}

// Reads rows of one step. `row` is a buffer of one row.
struct Residual {
  Inference& r;
  const int thread;
  const int32_t x, y, post_norm;
  const float post_eps, post_factor;
  float* const row;

  static int64_t row_bytes(const Inference& r, int32_t y) { return r.value(y).width * int64_t{sizeof(float)}; }

  // y at row `in_row` of the tokens, or at `out_row` if y has only selected rows. In place, or the sum of the ranks'
  // rows in `row`.
  const float* summed(int64_t out_row, int64_t in_row) const {
    const ckdist_value& v = r.value(y);
    const int64_t n = v.width;
    const float* parts[kMaxRanks];
    int64_t stride;
    if (v.place == ckdist_place_slot || v.place == ckdist_place_sums) {
      const int count = r.ranks->summands(int(v.offset), parts);
      const int64_t at = v.place == ckdist_place_slot ? (v.selected ? out_row : in_row)
                         : v.selected                 ? r.first_selected + out_row
                                                      : r.first_token + in_row;
      for (int p = 0; p < count; p++) parts[p] += at * n;
      r.count_moved(thread, (count - 1) * n * 4);
      if (count == 1) return parts[0];
      r.kernels.elementwise.sum_parts(nullptr, parts, count, n, row);
      return row;
    }
    if (v.place == ckdist_place_outputs) {
      const int rank = r.rank_of(r.batch.selected_tokens[out_row]);
      r.count_moved(thread, rank == r.ranks->local_rank ? 0 : n * 4);
      return r.peer_slot(v, rank) + out_row * n;
    }
    return r.floats(y, &stride) + (v.selected ? out_row : in_row) * n;
  }

  const float* read(int64_t out_row, int64_t in_row) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int64_t n = r.value(y).width;
    const float* s = summed(out_row, in_row);  // (hidden,)
    if (post_norm >= 0) k.rms_norm(s, r.vector(post_norm), post_eps, n, row), s = row;
    if (post_factor != 1.f) s = scaled(s, post_factor, n, row);
    if (x >= 0) {
      int64_t stride;
      const float* const before = r.floats(x, &stride) + (r.value(x).selected ? out_row : in_row) * n;
      const float* two[] = {before, s};
      k.sum_parts(nullptr, two, 2, n, row), s = row;
    }
    return s;
  }
};

}  // namespace ckdist
