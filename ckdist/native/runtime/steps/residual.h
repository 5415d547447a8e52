// Rows of the residual stream: scalar * (x + factor * rms_norm(sum of the ranks' summands)), and their norms.
#pragma once
#include "runtime/inference.h"
#include "runtime/shares.h"

namespace ckdist {

// Writes x * factor to `row`, which may be x.
inline const float* scaled(const float* x, float factor, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i++) row[i] = x[i] * factor;
  return row;
}

// factor * norm(s) of n floats, with the norm of the step: with an epsilon alone, an RMS norm without weights. Returns
// `s` if nothing changes, else `row`, which may be s.
template <class Fields>
const float* normed(const Inference& r, const Fields& step, const float* s, int64_t n, float* row) {
  const ElementwiseKernel& k = r.kernels.elementwise;
  if (step.norm >= 0 && step.centred) {
    k.layer_norm(s, r.vector(step.norm), step.norm_bias < 0 ? nullptr : r.vector(step.norm_bias), step.eps, n, row);
    s = row;
  } else if (step.norm >= 0) {
    k.rms_norm(s, r.vector(step.norm), step.eps, n, row), s = row;
  } else if (step.eps > 0.f) {
    const float mean = k.sum_squares(s, n) / float(n);
    s = scaled(s, 1.f / std::sqrt(mean + step.eps), n, row);
  }
  return step.factor != 1.f ? scaled(s, step.factor, n, row) : s;
}

// Reads rows of one step. `row` is a buffer of one row.
struct Residual {
  Inference& r;
  const int thread;
  float* const row;
  const int32_t y, x = -1, post_norm = -1, scalar = -1;
  const float post_eps = 0.f, post_factor = 1.f;

  static int64_t row_bytes(const Inference& r, int32_t y) { return r.value(y).width * int64_t{sizeof(float)}; }

  // `columns` of y at row `in_row` of the tokens, or at `out_row` if y has only selected rows. In place, or the sum of
  // the ranks' rows in `row`.
  const float* summed(int64_t out_row, int64_t in_row, Range columns) const {
    const ckdist_value& v = r.value(y);
    const int64_t n = v.width, count_of = columns.end - columns.begin;
    if (v.place == ckdist_place_slot || v.place == ckdist_place_sums) {
      const float* parts[kMaxRanks];
      const int count = r.ranks->summands(int(v.offset), parts);
      const int64_t at = v.place == ckdist_place_slot ? (v.selected ? out_row : in_row)
                         : v.selected                 ? r.first_selected + out_row
                                                      : r.first_token + in_row;
      for (int p = 0; p < count; p++) parts[p] += at * n + columns.begin;
      r.count_moved(thread, (count - 1) * count_of * 4);
      if (count == 1) return parts[0];
      r.kernels.elementwise.sum_parts(nullptr, parts, count, count_of, row);
      return row;
    }
    if (v.place == ckdist_place_outputs) {
      const int rank = r.rank_of(r.batch.selected_tokens[out_row]);
      r.count_moved(thread, rank == r.ranks->local_rank ? 0 : count_of * 4);
      return r.peer_slot(v, rank) + out_row * n + columns.begin;
    }
    return r.floats(y).row(v.selected ? out_row : in_row) + columns.begin;
  }

  const float* read(int64_t out_row, int64_t in_row) const {
    const Range all = {0, r.value(y).width};
    return added(summed(out_row, in_row, all), out_row, in_row, all);
  }
  // The row of a token, if y and x have rows of all tokens.
  const float* read(int64_t token) const { return read(token, token); }

  // scalar * (x + factor * norm(s)), where `s` has `columns` of the sum: all of them if there is a norm.
  const float* added(const float* s, int64_t out_row, int64_t in_row, Range columns) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int64_t n = columns.end - columns.begin;
    if (post_norm >= 0) k.rms_norm(s, r.vector(post_norm), post_eps, n, row), s = row;
    if (post_factor != 1.f) s = scaled(s, post_factor, n, row);
    if (x >= 0) {
      const float* two[] = {r.floats(x).row(r.value(x).selected ? out_row : in_row) + columns.begin, s};
      k.sum_parts(nullptr, two, 2, n, row), s = row;
    }
    return scalar >= 0 ? scaled(s, *r.vector(scalar), n, row) : s;
  }

  // Rows [0, n) of the sum, which the threads of the rank compute together, each its columns: otherwise each thread
  // would read the summands of all ranks. Every column is added in the same order. Null if they are so few bytes that
  // the barrier takes longer. Without a norm, x is added already.
  const float* shared(int64_t n, const ckdist_step& step, int index) const {
    constexpr int64_t kSharedBytes = 64 << 10;  // a core reads them in 4 to 8 us from other NUMA nodes
    const ckdist_value& v = r.value(y);
    if (r.active() == 1 || (v.place != ckdist_place_slot && v.place != ckdist_place_sums)) return nullptr;
    const float* parts[kMaxRanks];
    const int count = r.ranks->summands(int(v.offset), parts);
    if ((count - 1 + (x >= 0)) * n * v.width * 4 < kSharedBytes) return nullptr;
    const Range own = own_columns(v.width, thread, r.active());
    float* const rows = r.next_shared_rows(thread);
    for (int64_t out_row = 0; out_row < n; out_row++) {
      float* const to = rows + out_row * v.width + own.begin;
      const int64_t in_row = r.token_row(step, out_row);
      const Residual part = {r, thread, to, y, x, post_norm, scalar, post_eps, post_factor};
      const float* s = part.summed(out_row, in_row, own);
      if (post_norm < 0) s = part.added(s, out_row, in_row, own);
      if (s != to) std::copy(s, s + (own.end - own.begin), to);
    }
    r.meet(thread, index);
    return rows;
  }
};

// A step that reads rows of the residual stream.
template <class Fields>
struct ResidualRun : InferenceRun<Fields> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return Residual::row_bytes(r, step.y); }
  int64_t width() const { return this->r.value(this->step.y).width; }
  Residual residual(float* row) const {
    const Fields& s = this->step;
    return {this->r, this->thread, row, s.y, s.x, s.post_norm, s.scalar, s.post_eps, s.post_factor};
  }
  Residual residual() const { return residual(this->buffer()); }
};

}  // namespace ckdist
