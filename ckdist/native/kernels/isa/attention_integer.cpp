// Attention over a cache of integers (i16, q8_0): both products are dot products of 16-bit integers in pairs.
//
// One instruction does twice the products of a float multiplication, on every ISA, and reads the cache as it lies.
// Queries become 16-bit codes with a scale each, weights become whole numbers of 2^-16 of the span's largest and then
// codes: what that rounds away is less than what float16 keys and values lose (tests/test_attention.py has both
// numbers). Integer sums are exact, so two shapes of the same work give the same bits: for few queries a lane is a
// position (scores) or a dimension (values), and each load of the cache serves all queries; for many a lane is a query,
// and nothing but broadcasts of the cache is read in the inner loop.
//
// Per span: scores, their largest, weights = round(2^16 exp(score - largest)) whose sum is exact in a float too, codes
// of weight times scale of V, and the weighted sums.
#include "kernels/isa/attention_integer.h"

#include "kernels/isa/attention_bias.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/exp.h"
#include "kernels/isa/transpose_pairs.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kSpanBlocks = kSpan / kBlockTokens;

// Accumulators in Vecs for rows; Vecs of queries and positions or dimensions at once for lanes.
#if defined(__AVX512F__)
constexpr int kAccumulators = 16, kRows = 8, kVecs = 2, kSteps = 8;
#elif defined(__AVX2__) || defined(CKDIST_NEON)
constexpr int kAccumulators = 4, kRows = 4, kVecs = 1, kSteps = 4;
#else
constexpr int kAccumulators = 2, kRows = 2, kVecs = 1, kSteps = 2;
#endif
constexpr int kMostLanes = kVecs * kLanes;
constexpr int kQueriesAhead = 6;  // that are fetched while one is made codes

struct Workspace {
  int64_t floats = 0;
  int16_t* q;      // rows: groups of R queries, each (key_width / 2, R, 2); lanes: Vecs of queries, each (same, 16, 2)
  int16_t* codes;  // (16, key_width)
  float* factor;   // (lanes,): score / (codes of q . k)
  float* behind;   // (lanes,): latent: by how much more what is behind the values counts
  float* scores;   // rows: (R, 256); lanes: (256, Vecs, 16)
  int16_t* weights;  // rows: (groups, R, 256); lanes: (groups, 128, Vecs, 16, 2)
  float* k_scales;   // (groups of keys, 256)
  float* v_scales;   // (groups of values, 256)
  float* factors;    // (1 + groups, lanes)
  int16_t* keys;     // a span of int8 codes widened, as blocks of i16
  int16_t* values;   // likewise; latent: (Vecs of columns, 128 pairs of positions, 16, 2)
  float* part;
  float* state;

  Workspace(float* base, const CacheShape& cache, int tokens, int heads) {
    const auto groups_of = [](int width) -> int64_t { return width % 32 == 0 ? width / 32 : 1; };
    const int64_t lanes = round_lanes(int64_t{tokens} * heads), groups = groups_of(cache.value_width);
    const auto take = [&](int64_t n) {
      float* start = base ? base + floats : nullptr;
      floats += round_lanes(n);
      return start;
    };
    const auto words = [&](int64_t n) { return reinterpret_cast<int16_t*>(take((n + 1) / 2)); };
    q = words(lanes * cache.key_width);
    codes = words(kLanes * int64_t{cache.key_width});
    factor = take(lanes);
    behind = take(lanes);
    scores = take(kSpan * (kMostLanes > kRows ? kMostLanes : kRows));
    weights = words(groups * kSpan * (kMostLanes > kRows ? kMostLanes : kRows));
    const int64_t most_groups = cache.key_width / 32 + 2;  // of keys
    k_scales = take(most_groups * kSpan);
    v_scales = take(groups * kSpan);
    factors = take((1 + groups) * lanes);
    keys = words(kSpan * int64_t{cache.key_width});
    values = words(kSpan * round_lanes(cache.value_width));
    const int64_t most = lanes * (2 + groups) + lanes * round_lanes(cache.value_width);
    part = take(most);
    state = take(most);
  }
};

struct Span {
  int64_t start;
  int first, last;  // blocks in use
  const uint8_t* k[kSpanBlocks];
  const uint8_t* v[kSpanBlocks];
  const uint8_t* after_k[kSpanBlocks];  // fetched while the block's K is read; likewise V
  const uint8_t* after_v[kSpanBlocks];
  const float* k_scales;  // (groups, 256)
  const float* v_scales;
  int64_t v_vecs, v_pairs;  // codes from sixteen columns of V to the next, and from a pair of positions to the next

  // The codes of column `column` in a block of V.
  template <class Code>
  const Code* values(int block, int64_t column) const {
    return reinterpret_cast<const Code*>(v[block]) + column / kLanes * v_vecs + column % kLanes * 2;
  }
};

// Where in a key what is behind the values begins, and how its scores differ: (queries,).
struct Behind {
  int from;
  const float* factor;
};
Behind behind_of(const AttentionTask& task, const Workspace& work, int64_t row) {
  return {task.latent ? task.value_width : task.key_width, work.behind + row};
}

int rows_of_group(const Shape& shape) {
  const int64_t parts = (shape.queries + kRows - 1) / kRows;
  return static_cast<int>((shape.queries + parts - 1) / parts);
}

void prepare_queries(const AttentionTask& task, const Shape& shape, const Workspace& work) {
  const auto query = [&](int64_t row) {
    return task.q + row / task.heads * task.q_token_stride + row % task.heads * task.q_head_stride;
  };
  const auto codes = [&](int64_t row, int16_t* out) {
    // Tokens' rows are pages apart, so no hardware brings the next ones.
    if (row + kQueriesAhead < shape.queries) {
      const float* next = query(row + kQueriesAhead);
      for (int i = 0; i < task.key_width; i += kLanes) __builtin_prefetch(next + i);
    }
    const int width = task.latent ? task.value_width : task.key_width;
    float scale = quantise(query(row), width, kLargestCode, kLongest, out);
    work.behind[row] = 1.0f;
    if (width < task.key_width) {
      const float rest = quantise(query(row) + width, task.key_width - width, kLargestCode, kLongest, out + width);
      if (scale == 0.0f) scale = rest;
      else work.behind[row] = rest / scale;
    }
    work.factor[row] = scale * task.scale;
  };
  if (!shape.by_lane) {
    const int rows = rows_of_group(shape);
    for (int64_t row = 0; row < shape.queries; ++row) {
      const int64_t group = row / rows * rows, count = shape.queries - group < rows ? shape.queries - group : rows;
      int16_t* packed = work.q + group * task.key_width + (row - group) * 2;
      codes(row, work.codes);
      for (int i = 0; i < task.key_width; i += 2) std::memcpy(packed + i * count, work.codes + i, 4);
    }
    return;
  }
  const int pairs = task.key_width / 2;
  for (int64_t at = 0; at < shape.lanes; at += kLanes) {
    for (int r = 0; r < kLanes; ++r) {
      if (at + r < shape.queries) {
        codes(at + r, work.codes + r * task.key_width);
      } else {
        std::memset(work.codes + r * task.key_width, 0, 2 * task.key_width);
        work.factor[at + r] = 0.0f;
        work.behind[at + r] = 1.0f;
      }
    }
    for (int i = 0; i < pairs; i += kLanes) {  // pairs are moved as floats are
      const int count = pairs - i < kLanes ? pairs - i : kLanes;
      Vec tile[kLanes];
      for (int r = 0; r < kLanes; ++r)
        tile[r] = load_n(reinterpret_cast<const float*>(work.codes + r * task.key_width + 2 * i), count);
      transpose(tile);
      for (int j = 0; j < count; ++j)
        store(reinterpret_cast<float*>(work.q + at * task.key_width + (i + j) * 2 * kLanes), tile[j]);
    }
  }
}

// The scales of a block's group, of integers that are `Code`.
template <class Code>
CKDIST_INLINE Vec load_scales(const uint8_t* scales, int group) {
  if constexpr (sizeof(Code) == 1) return load_f16(reinterpret_cast<const uint16_t*>(scales) + group * kLanes);
  else return load(reinterpret_cast<const float*>(scales) + group * kLanes);
}

// The values of a latent cache: blocks [first, last) of K, whose pairs are of dimensions, as pairs of positions.
template <class Key>
void values_of_keys(const Span& span, int width, int16_t* values) {
  for (int b = span.first; b < span.last; ++b) {
    const Key* key = reinterpret_cast<const Key*>(span.k[b]);
    const int64_t ahead = span.after_k[b] - span.k[b];
    for (int column = 0; column < width; column += kLanes, key += kLanes * kBlockTokens) {
      for (int64_t line = 0; line < int64_t{sizeof(Key)} * kLanes * kBlockTokens; line += 64)
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(key) + ahead + line, 0, 2);
      transpose_pairs(key, width - column < kLanes ? width - column : kLanes,
                      values + (int64_t{column} * kSpan + int64_t{b} * kBlockTokens * kLanes));
    }
  }
}

template <class Key, class Value>
Span open_span(const AttentionTask& task, const Shape& shape, const Workspace& work, int64_t start) {
  const BlockLayout layout(task.cache());
  const int64_t begin = task.begin(), end = task.end();
  Span span = {};
  span.start = start;
  span.first = start < begin ? static_cast<int>((begin - start) / kBlockTokens) : 0;
  span.last = end - start < kSpan ? static_cast<int>((end - start + kBlockTokens - 1) / kBlockTokens) : kSpanBlocks;
  span.k_scales = work.k_scales;
  span.v_scales = work.v_scales;
  span.v_vecs = task.latent ? kSpan * kLanes : 2 * kLanes;
  span.v_pairs = task.latent ? 2 * kLanes : 2 * int64_t{task.value_width};
  const int64_t blocks = (end + kBlockTokens - 1) / kBlockTokens;
  const auto block = [&](int b) { return task.kv + task.block_table[start / kBlockTokens + b] * task.block_stride; };
  for (int b = span.first; b < span.last; ++b) {
    const uint8_t* at = block(b);
    span.k[b] = at;
    span.v[b] = at + layout.v_offset;
    for (int g = 0; g < key_groups(task.cache()); ++g)
      store(work.k_scales + g * kSpan + b * kLanes, load_scales<Key>(at + layout.k_scales_offset, g));
    // A weight of 0 must stay 0 where nothing is stored yet; where something is, the scale of K shows what is not a
    // number.
    for (int g = 0; g < shape.groups(); ++g) {
      const Vec scales = load_scales<Value>(at + layout.v_scales_offset, g);
      store(work.v_scales + g * kSpan + b * kLanes, select(less(abs(scales), set(3e38f)), scales, set(0.0f)));
    }
  }
  // While the keys of a span are read its values are fetched, meanwhile the keys of the next span, or the first
  // that are read next.
  for (int b = span.first; b < span.last; ++b) {
    span.after_k[b] = span.v[b];
    const int64_t next = start / kBlockTokens + kSpanBlocks + b;
    if (next < blocks) span.after_v[b] = block(kSpanBlocks + b);
    else if (task.next_kv && b < task.next_blocks)
      span.after_v[b] = task.next_kv + task.next_table[b] * task.block_stride;
    else span.after_v[b] = span.v[b];
  }
  if (task.latent) {  // the keys of the next span are fetched while these are made values
    for (int b = span.first; b < span.last; ++b) {
      span.after_k[b] = start / kBlockTokens + kSpanBlocks + b < blocks ? block(kSpanBlocks + b) : span.k[b];
      span.v[b] = span.after_v[b] = reinterpret_cast<const uint8_t*>(work.values + int64_t{b} * kBlockTokens * kLanes);
    }
    values_of_keys<Key>(span, task.value_width, work.values);
  }
  return span;
}

// The first position of the span that the query in `row` sees, and one past its last.
CKDIST_INLINE void seen(const AttentionTask& task, int64_t start, int64_t row, int* low, int* high) {
  const int64_t position = task.first_position + row / task.heads;
  const int64_t from = task.from(position) - start, to = task.to(position) - start;
  *low = static_cast<int>(from < 0 ? 0 : from > kSpan ? kSpan : from);
  *high = static_cast<int>(to < 0 ? 0 : to > kSpan ? kSpan : to);
}

// soft_cap 0: none.
CKDIST_INLINE Vec cap(Vec score, float soft_cap) {
  return soft_cap > 0.0f ? set(soft_cap) * tanh(score / set(soft_cap)) : score;
}

CKDIST_INLINE Vec lane_numbers() {
  static const float lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}

// What weights are multiplied by before their scales of V and rounding, for sixteen queries; and what undoes it.
template <class Code>
CKDIST_INLINE Vec weigh(Vec sum, Vec largest_scale, Vec* unit) {
  Vec factor = set(kLargestCode / 65536.0f);
  if constexpr (sizeof(Code) == 2) factor = min(set(kMostWeight) / sum, factor);
  const Vec scale = select(less(largest_scale, set(1e-36f)), set(1.0f), largest_scale);  // all values are zero
  *unit = scale / factor;
  return factor / scale;
}

// --- few queries, in rows ---

// Codes of R queries times those of B blocks from `first` on, scaled by K's scales: out (R, 256).
template <class Code, int R, int B>
__attribute__((noinline)) void score_rows(const Span& span, int first, const int16_t* q, int head_dim, int group,
                                          Behind behind, float* out) {
  const Code* k[B];
  int64_t ahead[B];
  for (int b = 0; b < B; ++b) {
    k[b] = reinterpret_cast<const Code*>(span.k[first + b]);
    ahead[b] = span.after_k[first + b] - span.k[first + b];
  }
  out += first * kLanes;
  for (int start = 0, end; start < head_dim; start += group) {
    end = start + group < head_dim ? start + group : head_dim;
    Ints sum[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) sum[r][b] = zeros();
    for (int i = start / 2; i < end / 2; ++i) {
      Ints key[B];
      for (int b = 0; b < B; ++b) {
        const Code* at = k[b] + i * 2 * kLanes;
        key[b] = load_pairs(at);
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(at) + ahead[b], 0, 2);
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
// is of `Code`, with the groups of `Value`.
template <class Code, class Value, int R, int D>
__attribute__((noinline)) void accumulate_rows(const Span& span, int first, int last, const int16_t* weights, int group,
                                               int64_t column, float* values, int64_t width) {
  constexpr int kShare =
      sizeof(Value) == 1 && D > 2 ? 2 : D;  // Vecs that share weights: a group of scales is two, or all
  Ints sum[R][D];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) sum[r][c] = zeros();
  const int16_t* w[D / kShare];
  for (int s = 0; s < D / kShare; ++s) w[s] = weights + (column + s * kShare * kLanes) / group * R * kSpan;
  for (int b = first; b < last; ++b) {
    const Code* v = span.values<Code>(b, column);
    const int64_t ahead = span.after_v[b] - span.v[b];
    for (int j = 0; j < kBlockTokens / 2; ++j, v += span.v_pairs) {
      Ints value[D];
      for (int c = 0; c < D; ++c) {
        value[c] = load_pairs(v + c * span.v_vecs);
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(v + c * span.v_vecs) + ahead, 0, 2);
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

// A group of R queries, the first of which is query `row`, into its lanes and rows of the part.
template <class Key, class Value, int R>
void attend_group(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                  const SpanPart& part, int64_t row) {
  constexpr int kBlocks = kAccumulators >= 4 * R ? 4 : kAccumulators >= 2 * R ? 2 : 1;
  int low[R], high[R], first = kSpanBlocks, last = 0;
  for (int r = 0; r < R; ++r) {
    seen(task, span.start, row + r, low + r, high + r);
    const int from = low[r] / kLanes, to = (high[r] + kLanes - 1) / kLanes;
    first = from < first ? from : first;
    last = to > last ? to : last;
  }
  if (first >= last) first = span.first, last = span.first;
  score_blocks<Key, R, kBlocks>(span, first, last, work.q + row * task.key_width, task.key_width,
                                key_group(task.cache()), behind_of(task, work, row), work.scores);

  float sums[kLanes] = {}, scales[kLanes] = {}, factors[kLanes], biases[kSpan];
  for (int r = 0; r < R; ++r) {
    float* scores = work.scores + r * kSpan;
    if (task.bias) {
      const ScoreBias bias(task, row + r);
      for (int i = first * kLanes; i < last * kLanes; ++i) biases[i] = bias.of(span.start + i);
    }
    const Vec factor = set(work.factor[row + r]), from = set(static_cast<float>(low[r])),
              to = set(static_cast<float>(high[r]));
    Vec largest = set(-__builtin_inff());
    for (int i = first * kLanes; i < last * kLanes; i += kLanes) {
      Vec s = load(scores + i) * factor;
      if (task.bias) s = s + load(biases + i);
      s = cap(s, task.soft_cap);
      if (i < low[r] || i + kLanes > high[r]) {
        const Vec position = lane_numbers() + set(static_cast<float>(i));
        s = select(less(position, to), select(less(position, from), set(-__builtin_inff()), s), set(-__builtin_inff()));
      }
      store(scores + i, s);
      largest = max(s, largest);
    }
    const float peak = reduce_max(largest);
    const Vec shift = set(peak == -__builtin_inff() ? 0.0f : peak);
    Vec sum = set(0.0f);
    for (int i = first * kLanes; i < last * kLanes; i += kLanes) {
      const Vec weight = exp_units(load(scores + i) - shift);
      store(scores + i, weight);
      sum = sum + weight;
    }
    part.largest[row + r] = peak;
    part.sum[row + r] = sums[r] = reduce_sum(sum);
  }
  for (int g = 0; g < shape.groups(); ++g) {
    for (int r = 0; r < R; ++r) {
      const Vec from = set(static_cast<float>(low[r])), to = set(static_cast<float>(high[r]));
      Vec largest = set(0.0f);
      for (int i = first * kLanes; i < last * kLanes; i += kLanes) {
        Vec scale = load(span.v_scales + g * kSpan + i);
        if (i < low[r] || i + kLanes > high[r]) {
          const Vec position = lane_numbers() + set(static_cast<float>(i));
          scale = select(less(position, to), select(less(position, from), set(0.0f), scale), set(0.0f));
        }
        largest = max(scale, largest);
      }
      scales[r] = reduce_max(largest);
    }
    Vec unit;
    store(factors, weigh<Value>(load(sums), load(scales), &unit));
    float units[kLanes];
    store(units, unit);
    for (int r = 0; r < R; ++r) {
      part.unit[g * shape.lanes + row + r] = units[r];
      int16_t* weights = work.weights + (g * R + r) * kSpan;
      for (int i = first * kLanes; i < last * kLanes; i += kLanes)
        store_i16(weights + i,
                  (load(work.scores + r * kSpan + i) * set(factors[r])) * load(span.v_scales + g * kSpan + i));
    }
  }
  const auto accumulate = [&](auto code) {
    accumulate_columns<decltype(code), Value, R, 8>(span, first, last, work.weights, shape.group, 0,
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

// --- many queries, in lanes ---

// int8 codes of `width` dimensions as the blocks of i16 would have them: keys or values of the blocks in use.
void widen(const uint8_t* const* codes, int first, int last, int width, int16_t* to, const uint8_t** out) {
  const int64_t tile = int64_t{width} * kBlockTokens;
  for (int b = first; b < last; ++b) {
    int16_t* wide = to + b * tile;
    for (int64_t i = 0; i < tile; i += 2 * kLanes)
      store_pairs(wide + i, load_pairs(reinterpret_cast<const int8_t*>(codes[b]) + i));
    out[b] = reinterpret_cast<const uint8_t*>(wide);
  }
}

// Scores of P Vecs of queries against one block: out (16, P, 16), scaled by K's scales. `after`: what is fetched
// meanwhile, as long as the block; null: nothing.
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
// last). `fetched`: what comes after these blocks, meanwhile.
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

// Vec p of P: its scores into weights, for the positions [first, last) of which lane i counts [low[i], high[i]).
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

// The P Vecs of queries from `at` on; false where none of them sees the span. `fetched`: what comes after the keys and
// values, meanwhile.
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

// Calls done(first lane, last lane) for every Vecs of queries that see the span.
template <class Key, class Value, class Done>
void attend_lanes(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& codes,
                  const SpanPart& part, Done&& done) {
  Span span = codes;
  if (sizeof(Key) == 1) widen(codes.k, codes.first, codes.last, task.key_width, work.keys, span.k);
  if (sizeof(Value) == 1 && !task.latent)
    widen(codes.v, codes.first, codes.last, task.value_width, work.values, span.v);
  const bool fetches = sizeof(Key) == 2 && sizeof(Value) == 2 && !task.latent;  // others are read when made these
  bool fetched = false;                                                         // once is enough
  int64_t at = 0;
  if constexpr (kVecs > 1)
    for (; shape.lanes - at >= kMostLanes; at += kMostLanes)
      if (attend_vecs<Value, kVecs>(task, shape, work, span, part, at, fetches && !fetched))
        fetched = true, done(at, at + kMostLanes);
  for (; at < shape.lanes; at += kLanes)
    if (attend_vecs<Value, 1>(task, shape, work, span, part, at, fetches && !fetched))
      fetched = true, done(at, at + kLanes);
}

template <class Key, class Value>
void attend_typed(const AttentionTask& task, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of(task);
  const SpanPart part(work.part, shape), state(work.state, shape);
  prepare_queries(task, shape, work);
  clear(shape, part);
  clear(shape, state);
  for (int64_t s = task.first_span(); s < task.last_span(); ++s) {
    const Span span = open_span<Key, Value>(task, shape, work, s * kSpan);
    if (shape.by_lane) {
      attend_lanes<Key, Value>(task, shape, work, span, part, [&](int64_t first, int64_t last) {
        merge_part(shape, part, state, work.factors, first, last);
      });
    } else {
      attend_rows<Key, Value>(task, shape, work, span, part);
      merge_part(shape, part, state, work.factors, 0, shape.lanes);
    }
  }
  finish(task, shape, state);
}

template <class Key, class Value>
void attend_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of(task);
  prepare_queries(task, shape, work);
  for (int64_t s = first; s < last; ++s) {
    const SpanPart part(parts + (s - first) * shape.part_floats(), shape);
    clear(shape, part);
    const Span span = open_span<Key, Value>(task, shape, work, s * kSpan);
    if (shape.by_lane) attend_lanes<Key, Value>(task, shape, work, span, part, [](int64_t, int64_t) {});
    else attend_rows<Key, Value>(task, shape, work, span, part);
  }
}

// Calls run(a key's code, a value's code).
template <class Run>
void by_types(const AttentionTask& task, Run&& run) {
  const bool key_bytes = task.key_type == KvType::q8_0, value_bytes = task.value_type == KvType::q8_0;
  if (key_bytes) value_bytes ? run(int8_t{}, int8_t{}) : run(int8_t{}, int16_t{});
  else value_bytes ? run(int16_t{}, int8_t{}) : run(int16_t{}, int16_t{});
}

}  // namespace

int64_t integer_scratch_floats(const CacheShape& cache, int tokens, int heads) {
  return Workspace(nullptr, cache, tokens, heads).floats;
}

void attend_integer(const AttentionTask& task, float* scratch) {
  by_types(task, [&](auto key, auto value) { attend_typed<decltype(key), decltype(value)>(task, scratch); });
}

void attend_integer_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  by_types(task, [&](auto key, auto value) {
    attend_spans<decltype(key), decltype(value)>(task, first, last, parts, scratch);
  });
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
