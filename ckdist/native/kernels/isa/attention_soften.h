// Converts the scores of queries over a span to integer codes of their weights; lanes are positions. Private to isa/.
#pragma once
#include "kernels/isa/attention_bias.h"
#include "kernels/isa/attention_span.h"
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Up to sixteen queries, beginning with query `row`. In the blocks [first, last) of a span, query r sees [low[r],
// high[r]).
struct QueryGroup {
  int64_t row;
  int rows, first, last;
  int low[kLanes], high[kLanes];

  QueryGroup() = default;
  QueryGroup(const AttentionTask& task, int64_t span_start, int64_t first_row, int count)
      : row(first_row), rows(count), first(kSpanBlocks), last(0) {
    for (int r = 0; r < rows; ++r) {
      seen(task, span_start, row + r, low + r, high + r);
      const int from = low[r] / kLanes, to = (high[r] + kLanes - 1) / kLanes;
      first = from < first ? from : first;
      last = to > last ? to : last;
    }
  }
  bool sees_all(int r, int from, int to) const { return low[r] <= from && high[r] >= to; }
};

// `here` in the lanes of positions [i, i + 16) that query r of the group sees, else `other`.
CKDIST_INLINE Vec seen_or(const QueryGroup& group, int r, int i, Vec here, Vec other) {
  if (group.sees_all(r, i, i + kLanes)) return here;
  const Vec position = lane_numbers() + set(static_cast<float>(i));
  return select(less(position, set(static_cast<float>(group.high[r]))),
                select(less(position, set(static_cast<float>(group.low[r]))), other, here), other);
}

// Converts scores (rows, 256) to weights, and writes the part except its values. Then calls weigh(group of values, r,
// factor). The weights of query r must be multiplied by factor and their scales of V, and rounded.
template <class Value, class Weigh>
CKDIST_INLINE void soften_rows(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                               const SpanPart& part, const QueryGroup& group, float* scores, Weigh&& weigh_row) {
  const int from = group.first * kLanes, to = group.last * kLanes, rows = group.rows;
  const int64_t row = group.row;
  float sums[kLanes] = {}, scales[kLanes] = {}, factors[kLanes], biases[kSpan];
  for (int r = 0; r < rows; ++r) {
    float* score = scores + r * kSpan;
    if (task.bias) {
      const ScoreBias bias(task, row + r);
      for (int i = from; i < to; ++i) biases[i] = bias.of(span.start + i);
    }
    const bool plain = task.bias == nullptr && task.soft_cap <= 0.0f;
    const Vec factor = set(work.factor[row + r]);
    Vec largest = set(-__builtin_inff());
    for (int i = from; i < to; i += kLanes) {
      Vec s = load(score + i) * factor;
      if (!plain) {
        if (task.bias) s = s + load(biases + i);
        s = cap(s, task.soft_cap);
      }
      s = seen_or(group, r, i, s, set(-__builtin_inff()));
      store(score + i, s);
      largest = max(s, largest);
    }
    const float peak = reduce_max(largest);
    const Vec shift = set(peak == -__builtin_inff() ? 0.0f : peak);
    Vec sum = set(0.0f);
    for (int i = from; i < to; i += kLanes) {
      const Vec weight = exp_units(load(score + i) - shift);
      store(score + i, weight);
      sum = sum + weight;
    }
    part.largest[row + r] = peak;
    part.sum[row + r] = sums[r] = reduce_sum(sum);
  }
  for (int g = 0; g < shape.groups(); ++g) {
    int last_whole = -1;  // a query that sees all positions: later ones have the same largest scale
    for (int r = 0; r < rows; ++r) {
      const bool whole = group.sees_all(r, from, to);
      if (whole && last_whole >= 0) {
        scales[r] = scales[last_whole];
        continue;
      }
      Vec largest = set(0.0f);
      for (int i = from; i < to; i += kLanes)
        largest = max(seen_or(group, r, i, load(span.v_scales + g * kSpan + i), set(0.0f)), largest);
      scales[r] = reduce_max(largest);
      if (whole) last_whole = r;
    }
    Vec unit;
    store(factors, weigh<Value>(load(sums), load(scales), &unit));
    float units[kLanes];
    store(units, unit);
    for (int r = 0; r < rows; ++r) {
      part.unit[g * shape.lanes + row + r] = units[r];
      weigh_row(g, r, set(factors[r]));
    }
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
