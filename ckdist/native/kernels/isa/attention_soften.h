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
};

// `here` in the lanes of positions [i, i + 16) within [low, high), else `other`.
CKDIST_INLINE Vec seen_or(int low, int high, int i, Vec here, Vec other) {
  if (low <= i && high >= i + kLanes) return here;
  const Vec position = lane_numbers() + set(static_cast<float>(i));
  return select(less(position, set(static_cast<float>(high))),
                select(less(position, set(static_cast<float>(low))), other, here), other);
}

// Completes the scores (256,) of query r of the group, and returns the largest.
CKDIST_INLINE float complete_scores(const AttentionTask& task, const Workspace& work, const Span& span,
                                    const QueryGroup& group, int r, float* scores) {
  const int from = group.first * kLanes, to = group.last * kLanes, low = group.low[r], high = group.high[r];
  float biases[kSpan];
  if (task.bias) {
    const ScoreBias bias(task, group.row + r);
    for (int i = from; i < to; ++i) biases[i] = bias.of(span.start + i);
  }
  const bool plain = task.bias == nullptr && task.soft_cap <= 0.0f;
  const Vec factor = set(work.factor[group.row + r]);
  Vec largest = set(-__builtin_inff());
  const auto complete = [&](auto completed) CKDIST_INLINED {
    for (int i = from; i < to; i += kLanes) {
      const Vec s = completed(load(scores + i) * factor, i);
      store(scores + i, s);
      largest = max(s, largest);
    }
  };
  if (plain && low <= from && high >= to) complete([](Vec s, int) CKDIST_INLINED { return s; });
  else
    complete([&](Vec s, int i) CKDIST_INLINED {
      if (!plain) {
        if (task.bias) s = s + load(biases + i);
        s = cap(s, task.soft_cap);
      }
      return seen_or(low, high, i, s, set(-__builtin_inff()));
    });
  return reduce_max(largest);
}

// Converts the scores [from, to) of a query to weights, and returns their sum.
CKDIST_INLINE float exponentiate(float peak, int from, int to, float* scores) {
  const Vec shift = set(peak == -__builtin_inff() ? 0.0f : peak);
  Vec sum = set(0.0f);
  for (int i = from; i < to; i += kLanes) {
    const Vec weight = exp_units(load(scores + i) - shift);
    store(scores + i, weight);
    sum = sum + weight;
  }
  return reduce_sum(sum);
}

// The largest scale of the values that each query of a group sees.
CKDIST_INLINE void largest_scales(const QueryGroup& group, const float* scales, float* largest) {
  for (int r = 0; r < group.rows; ++r) {
    const int low = group.low[r], high = group.high[r];
    if (r > 0 && low == group.low[r - 1] && high == group.high[r - 1]) {  // another head, or the whole span
      largest[r] = largest[r - 1];
      continue;
    }
    Vec most = set(0.0f);
    for (int i = low / kLanes * kLanes; i < high; i += kLanes)
      most = max(seen_or(low, high, i, load(scales + i), set(0.0f)), most);
    largest[r] = reduce_max(most);
  }
}

// Converts scores (rows, 256) to weights, and writes the part except its values. Then calls weigh(group of values, r,
// factor). The weights of query r must be multiplied by factor and their scales of V, and rounded. Each step is done
// for all rows before the next one, so that no row waits for another one's sum.
template <class Value, class Weigh>
CKDIST_INLINE void soften_rows(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                               const SpanPart& part, const QueryGroup& group, float* scores, Weigh&& weigh_row) {
  const int from = group.first * kLanes, to = group.last * kLanes, rows = group.rows;
  const int64_t row = group.row;
  float sums[kLanes] = {}, scales[kLanes] = {}, factors[kLanes], units[kLanes];
  for (int r = 0; r < rows; ++r)
    part.largest[row + r] = complete_scores(task, work, span, group, r, scores + r * kSpan);
  for (int r = 0; r < rows; ++r)
    part.sum[row + r] = sums[r] = exponentiate(part.largest[row + r], from, to, scores + r * kSpan);
  for (int g = 0; g < shape.groups(); ++g) {
    largest_scales(group, span.v_scales + g * kSpan, scales);
    Vec unit;
    store(factors, weigh<Value>(load(sums), load(scales), &unit));
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
