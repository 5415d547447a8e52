// Few queries over a span of an integer cache: a lane is a position (scores) or a dimension (values), and each load of
// the cache serves all queries. Private to isa/.
#pragma once
#include <type_traits>

#include "kernels/isa/attention_soften.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

int rows_of_group(const Shape& shape) {
  const int64_t parts = (shape.queries + kRows - 1) / kRows;
  return static_cast<int>((shape.queries + parts - 1) / parts);
}

// Codes of R queries times those of B blocks from `first` on, scaled by K's scales: out (R, 256).
template <class Code, int R, int B>
__attribute__((noinline)) void score_rows(const Span& span, int first, const int16_t* q, int head_dim, int group,
                                          Behind behind, float* out) {
  int64_t ahead[B];
  for (int b = 0; b < B; ++b) { ahead[b] = span.after_k[first + b] - span.k[first + b]; }
  out += first * kLanes;
  for (int start = 0, end; start < head_dim; start += group) {
    end = start + group < head_dim ? start + group : head_dim;
    Ints sum[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) sum[r][b] = zeros();
    for (int i = start / 2; i < end / 2; ++i) {
      Ints key[B];
      for (int b = 0; b < B; ++b) {
        const Code* at = codes_at<Code>(span.k[first + b], int64_t{i} * 2 * kLanes);
        key[b] = load_pairs(at);
        if (i % kLoadsPerLine<Code> == 0) __builtin_prefetch(reinterpret_cast<const uint8_t*>(at) + ahead[b], 0, 2);
      }
      for (int r = 0; r < R; ++r) {
        const Ints x = set_pair(q + (int64_t{i} * R + r) * 2);
        for (int b = 0; b < B; ++b) sum[r][b] = dot(sum[r][b], x, key[b]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) {
        float* at = out + r * kSpan + b * kLanes;
        Vec scale = load(span.k_scales + start / group * kSpan + (first + b) * kLanes);
        if (start >= behind.from) scale = scale * set(behind.factor[r]);
        store(at, fma(to_floats(sum[r][b]), scale, start > 0 ? load(at) : set(0.0f)));
      }
    }
  }
}

template <class Code, int R, int B>
void score_blocks(const Span& span, int first, int last, const int16_t* q, int head_dim, int group, Behind behind,
                  float* out) {
  for (; last - first >= B; first += B) score_rows<Code, R, B>(span, first, q, head_dim, group, behind, out);
  if constexpr (B > 1) score_blocks<Code, R, B / 2>(span, first, last, q, head_dim, group, behind, out);
}

// values (R, width) columns [column, column + 16 D) = weights (groups, R, 256) times the V of blocks [first, last). V
// has type `Code` and the groups of `Value`.
template <class Code, class Value, int R, int D>
__attribute__((noinline)) void accumulate_rows(const Span& span, int first, int last, const int16_t* weights, int group,
                                               int64_t column, float* values, int64_t width) {
  constexpr int kShare =
      sizeof(Value) == 1 && D > 2 ? 2 : D;  // Vecs that share weights: two form a group of scales, or all
  Ints sum[R][D];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) sum[r][c] = zeros();
  const int16_t* w[D / kShare];
  for (int s = 0; s < D / kShare; ++s) w[s] = weights + (column + s * kShare * kLanes) / group * R * kSpan;
  const int64_t next_pair = span.v_pairs / 2 * kPairBytes<Code>;
  for (int b = first; b < last; ++b) {
    const uint8_t* v = reinterpret_cast<const uint8_t*>(span.values<Code>(b, column));
    const int64_t ahead = span.after_v[b] - span.v[b];
    for (int j = 0; j < kBlockTokens / 2; ++j, v += next_pair) {
      Ints value[D];
      for (int c = 0; c < D; ++c) {
        const Code* at = codes_at<Code>(v, c * span.v_vecs);
        value[c] = load_pairs(at);
        if (c % kLoadsPerLine<Code> == 0) __builtin_prefetch(reinterpret_cast<const uint8_t*>(at) + ahead, 0, 2);
      }
      for (int r = 0; r < R; ++r) {
        for (int s = 0; s < D / kShare; ++s) {
          const Ints weight = set_pair(w[s] + r * kSpan + b * kLanes + 2 * j);
          for (int c = s * kShare; c < (s + 1) * kShare; ++c) sum[r][c] = dot(sum[r][c], weight, value[c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) store(values + r * width + column + c * kLanes, to_floats(sum[r][c]));
}

template <class Code, class Value, int R, int D>
void accumulate_columns(const Span& span, int first, int last, const int16_t* weights, int group, int64_t column,
                        float* values, int64_t width) {
  if constexpr (R * D <= kAccumulators)
    for (; width - column >= D * kLanes; column += D * kLanes)
      accumulate_rows<Code, Value, R, D>(span, first, last, weights, group, column, values, width);
  if constexpr (D > 1)
    accumulate_columns<Code, Value, R, D / 2>(span, first, last, weights, group, column, values, width);
}

// Code that depends only on the bytes of a value is compiled once for each number of bytes.
template <class Value>
using Sized = std::conditional_t<sizeof(Value) == 1, int8_t, int16_t>;

// Converts the scores of a group of queries to weights, and writes its lanes of the part.
template <class Value>
__attribute__((noinline)) void weigh_rows(const AttentionTask& task, const Shape& shape, const Workspace& work,
                                          const Span& span, const SpanPart& part, const QueryGroup& group) {
  const int first = group.first, last = group.last;
  const auto weigh_row = [&](int g, int r, Vec factor) {
    int16_t* weights = work.weights + (g * group.rows + r) * kSpan;
    for (int i = first * kLanes; i < last * kLanes; i += kLanes)
      store_i16(weights + i, (load(work.scores + r * kSpan + i) * factor) * load(span.v_scales + g * kSpan + i));
  };
  soften_rows<Value>(task, shape, work, span, part, group, work.scores, weigh_row);
}

// A group of R queries, beginning with query `row`: computes its lanes and rows of the part.
template <class Key, class Value, int R>
void attend_group(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                  const SpanPart& part, int64_t row) {
  constexpr int kBlocks = kAccumulators >= 4 * R ? 4 : kAccumulators >= 2 * R ? 2 : 1;
  QueryGroup group(task, span.start, row, R);
  if (group.first >= group.last) group.first = group.last = span.first;
  const int first = group.first, last = group.last;
  score_blocks<Key, R, kBlocks>(span, first, last, work.q + row * task.key_width, task.key_width,
                                key_group(task.cache()), behind_of(task, work, row), work.scores);
  weigh_rows<Sized<Value>>(task, shape, work, span, part, group);
  const auto accumulate = [&](auto code) {
    accumulate_columns<decltype(code), Sized<Value>, R, 8>(span, first, last, work.weights, shape.group, 0,
                                                           part.values + row * shape.width, shape.width);
  };
  task.latent ? accumulate(int16_t{}) : accumulate(Value{});
}

template <class Key, class Value>
void attend_rows(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                 const SpanPart& part) {
  const int rows = rows_of_group(shape);
  for (int64_t row = 0; row < shape.queries; row += rows) {
    switch (shape.queries - row < rows ? shape.queries - row : rows) {
      case 1: attend_group<Key, Value, 1>(task, shape, work, span, part, row); break;
      case 2: attend_group<Key, Value, 2>(task, shape, work, span, part, row); break;
#if defined(__AVX2__) || defined(CKDIST_NEON)
      case 3: attend_group<Key, Value, 3>(task, shape, work, span, part, row); break;
      case 4: attend_group<Key, Value, 4>(task, shape, work, span, part, row); break;
#endif
#if defined(__AVX512F__)
      case 5: attend_group<Key, Value, 5>(task, shape, work, span, part, row); break;
      case 6: attend_group<Key, Value, 6>(task, shape, work, span, part, row); break;
      case 7: attend_group<Key, Value, 7>(task, shape, work, span, part, row); break;
      case 8: attend_group<Key, Value, 8>(task, shape, work, span, part, row); break;
#endif
    }
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
