// Many queries over a span of an integer cache: a lane is a query, and the inner loop reads only broadcasts of the
// cache. Private to isa/.
#pragma once
#include "kernels/isa/attention_bias.h"
#include "kernels/isa/attention_span.h"
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Converts codes of `width` dimensions to the layout of i16: keys or values of the blocks in use.
template <class Code>
void widen(const uint8_t* const* codes, int first, int last, int width, int16_t* to, const uint8_t** out) {
  const int64_t tile = int64_t{width} * kBlockTokens;
  for (int b = first; b < last; ++b) {
    int16_t* wide = to + b * tile;
    for (int64_t i = 0; i < tile; i += 2 * kLanes) store_pairs(wide + i, load_pairs(codes_at<Code>(codes[b], i)));
    out[b] = reinterpret_cast<const uint8_t*>(wide);
  }
}

// Scores of P Vecs of queries against one block: out (16, P, 16), scaled by K's scales. `after`: memory of a block's
// size that is prefetched meanwhile; null: none.
template <int P>
__attribute__((noinline)) void score_lanes(const int16_t* key, const int16_t* q, int head_dim, int group,
                                           const float* scales, Behind behind, const uint8_t* after, float* out) {
  for (int start = 0, end; start < head_dim; start += group) {
    end = start + group < head_dim ? start + group : head_dim;
    for (int first = 0; first < kBlockTokens; first += kSteps) {
      Ints sum[P][kSteps];
      for (int p = 0; p < P; ++p)
        for (int j = 0; j < kSteps; ++j) sum[p][j] = zeros();
      for (int i = start / 2; i < end / 2; ++i) {
        Ints x[P];
        for (int p = 0; p < P; ++p) x[p] = load_pairs(q + int64_t{p} * kLanes * head_dim + i * 2 * kLanes);
        if (after != nullptr && first == 0) __builtin_prefetch(after + i * 4 * kBlockTokens, 0, 2);
        for (int j = 0; j < kSteps; ++j) {
          const Ints k = set_pair(key + (i * kBlockTokens + first + j) * 2);
          for (int p = 0; p < P; ++p) sum[p][j] = dot(sum[p][j], x[p], k);
        }
      }
      for (int j = 0; j < kSteps; ++j) {
        for (int p = 0; p < P; ++p) {
          float* at = out + ((first + j) * P + p) * kLanes;
          Vec scale = set(scales[start / group * kSpan + first + j]);
          if (start >= behind.from) scale = scale * load(behind.factor + p * kLanes);
          store(at, fma(to_floats(sum[p][j]), scale, start > 0 ? load(at) : set(0.0f)));
        }
      }
    }
  }
}

// values (head_dim, 16) of each of P Vecs of queries = weights (groups, 128, P, 16, 2) times the V of blocks [first,
// last). `fetched`: memory after these blocks that is prefetched meanwhile.
template <int P>
__attribute__((noinline)) void accumulate_lanes(const Span& span, int first, int last, const int16_t* weights,
                                                int head_dim, int group, bool fetched, float* values) {
  for (int column = 0; column < head_dim; column += kSteps) {
    const int16_t* w = weights + int64_t{column} / group * kSpan * P * kLanes;
    Ints sum[P][kSteps];
    for (int p = 0; p < P; ++p)
      for (int c = 0; c < kSteps; ++c) sum[p][c] = zeros();
    for (int b = first; b < last; ++b) {
      const int16_t* v = span.values<int16_t>(b, column);
      const uint8_t* after = fetched && column % kLanes == 0 ? span.after_v[b] + column * 4 : nullptr;
      for (int j = b * kBlockTokens / 2; j < (b + 1) * kBlockTokens / 2; ++j, v += span.v_pairs) {
        if (after != nullptr) __builtin_prefetch(after, 0, 2), after += 2 * span.v_pairs;
        Ints weight[P];
        for (int p = 0; p < P; ++p) weight[p] = load_pairs(w + (j * P + p) * 2 * kLanes);
        for (int c = 0; c < kSteps; ++c) {
          const Ints value = set_pair(v + 2 * c);
          for (int p = 0; p < P; ++p) sum[p][c] = dot(sum[p][c], weight[p], value);
        }
      }
    }
    for (int c = 0; c < kSteps; ++c)
      for (int p = 0; p < P; ++p) store(values + (int64_t{p} * head_dim + column + c) * kLanes, to_floats(sum[p][c]));
  }
}

// Vec p of P: converts its scores to weights, for the positions [first, last). Lane i counts positions [low[i],
// high[i]).
template <class Value, int P>
__attribute__((noinline)) void soften_lanes(const AttentionTask& task, const Shape& shape, const Workspace& work,
                                            const Span& span, const SpanPart& part, int64_t at, int p, int first,
                                            int last, const float* low, const float* high, bool edge) {
  float* scores = work.scores + p * kLanes;
  const Vec factor = load(work.factor + at), from = load(low), to = load(high);
  ScoreBias biases[kLanes];
  if (task.bias)
    for (int64_t l = 0; l < kLanes; ++l)
      biases[l] = ScoreBias(task, at + l < shape.queries ? at + l : shape.queries - 1);
  Vec largest = set(-__builtin_inff());
  for (int i = first; i < last; ++i) {
    float* score = scores + i * P * kLanes;
    Vec s = load(score) * factor;
    if (task.bias) {
      float added[kLanes];
      for (int l = 0; l < kLanes; ++l) added[l] = biases[l].of(span.start + i);
      s = s + load(added);
    }
    s = cap(s, task.soft_cap);
    if (edge) {
      const Vec position = set(static_cast<float>(i));
      s = select(less(position, to), select(less(position, from), set(-__builtin_inff()), s), set(-__builtin_inff()));
    }
    store(score, s);
    largest = max(s, largest);
  }
  const Vec shift = select(less(largest, set(-3e38f)), set(0.0f), largest);
  Vec sum = set(0.0f);
  for (int i = first; i < last; ++i) {
    float* score = scores + i * P * kLanes;
    const Vec weight = exp_units(load(score) - shift);
    store(score, weight);
    sum = sum + weight;
  }
  store(part.largest + at, largest);
  store(part.sum + at, sum);
  for (int g = 0; g < shape.groups(); ++g) {
    const float* scales = span.v_scales + g * kSpan;
    Vec largest_scale = set(0.0f);
    if (edge) {
      for (int i = first; i < last; ++i) {
        const Vec position = set(static_cast<float>(i));
        const Vec scale = select(less(position, from), set(0.0f), set(scales[i]));
        largest_scale = max(select(less(position, to), scale, set(0.0f)), largest_scale);
      }
    } else {
      for (int i = first; i < last; i += kLanes) largest_scale = max(load(scales + i), largest_scale);
      largest_scale = set(reduce_max(largest_scale));
    }
    Vec unit;
    const Vec weight = weigh<Value>(sum, largest_scale, &unit);
    store(part.unit + g * shape.lanes + at, unit);
    int16_t* out = work.weights + g * kSpan * P * kLanes + p * 2 * kLanes;
    for (int i = first; i < last; i += 2) {
      const float* score = scores + i * P * kLanes;
      const Vec even = (load(score) * weight) * set(scales[i]),
                odd = (load(score + P * kLanes) * weight) * set(scales[i + 1]);
      store_pairs(out + i * P * kLanes, round_pairs(even, odd));
    }
  }
}

// The P Vecs of queries from `at` on. Returns false if none of them sees the span. `fetched`: memory after the keys and
// values that is prefetched meanwhile.
template <class Value, int P>
bool attend_vecs(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                 const SpanPart& part, int64_t at, bool fetched) {
  float low[P * kLanes], high[P * kLanes];
  int least_low = kSpan, most_low = 0, least_high = kSpan, most_high = 0;
  for (int i = 0; i < P * kLanes; ++i) {
    int from, to;
    seen(task, span.start, at + i < shape.queries ? at + i : shape.queries - 1, &from, &to);
    low[i] = static_cast<float>(from);
    high[i] = static_cast<float>(to);
    least_low = from < least_low ? from : least_low;
    most_low = from > most_low ? from : most_low;
    least_high = to < least_high ? to : least_high;
    most_high = to > most_high ? to : most_high;
  }
  const int first = least_low / kLanes, last = (most_high + kLanes - 1) / kLanes;
  if (first >= last) return false;
  const bool edge = most_low > first * kLanes || least_high < last * kLanes;
  for (int b = first; b < last; ++b)
    score_lanes<P>(reinterpret_cast<const int16_t*>(span.k[b]), work.q + at * task.key_width, task.key_width,
                   key_group(task.cache()), span.k_scales + b * kLanes, behind_of(task, work, at),
                   fetched ? span.after_k[b] : nullptr, work.scores + b * kLanes * P * kLanes);
  for (int p = 0; p < P; ++p)
    soften_lanes<Value, P>(task, shape, work, span, part, at + p * kLanes, p, first * kLanes, last * kLanes,
                           low + p * kLanes, high + p * kLanes, edge);
  accumulate_lanes<P>(span, first, last, work.weights, task.value_width, shape.group, fetched,
                      part.values + at * task.value_width);
  return true;
}

// Calls done(first lane, last lane) for every group of Vecs of queries that see the span.
template <class Key, class Value, class Done>
void attend_lanes(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& codes,
                  const SpanPart& part, Done&& done) {
  Span span = codes;
  if (sizeof(Key) == 1) widen<Key>(codes.k, codes.first, codes.last, task.key_width, work.keys, span.k);
  if (sizeof(Value) == 1 && !task.latent)
    widen<Value>(codes.v, codes.first, codes.last, task.value_width, work.values, span.v);
  // Other types are read while they are converted.
  const bool fetches = sizeof(Key) == 2 && sizeof(Value) == 2 && !task.latent;
  bool fetched = false;  // once is enough
  int64_t at = 0;
  if constexpr (kVecs > 1)
    for (; shape.lanes - at >= kMostLanes; at += kMostLanes)
      if (attend_vecs<Value, kVecs>(task, shape, work, span, part, at, fetches && !fetched))
        fetched = true, done(at, at + kMostLanes);
  for (; at < shape.lanes; at += kLanes)
    if (attend_vecs<Value, 1>(task, shape, work, span, part, at, fetches && !fetched))
      fetched = true, done(at, at + kLanes);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
