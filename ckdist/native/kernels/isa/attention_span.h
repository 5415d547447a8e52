// A span of an integer cache that is being read: addresses of its codes and scales, memory to prefetch, and the buffers
// of attention. Private to isa/.
#pragma once
#include "kernels/isa/attention_integer.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/exp.h"
#include "kernels/isa/transpose_pairs.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kSpanBlocks = kSpan / kBlockTokens;

// Accumulators in Vecs, for rows; Vecs of queries and of positions or dimensions at a time, for lanes.
#if defined(__AVX512F__)
constexpr int kAccumulators = 16, kRows = 8, kVecs = 2, kSteps = 8;
#elif defined(__AVX2__) || defined(CKDIST_NEON)
constexpr int kAccumulators = 4, kRows = 4, kVecs = 1, kSteps = 4;
#else
constexpr int kAccumulators = 2, kRows = 2, kVecs = 1, kSteps = 2;
#endif
constexpr int kMostLanes = kVecs * kLanes;
// Additional codes that tiles may read: per query for up to two scales, and after the last keys.
constexpr int kQueryPadding = 64, kKeyPadding = 1024;
// Queries whose scores and weights exist at once.
constexpr int kVectorRows = kMostLanes > kRows ? kMostLanes : kRows;
#if defined(__AMX_INT8__)
constexpr int kMostGroups = 8, kMostRows = 16 * kMostGroups;
#else
constexpr int kMostRows = kVectorRows;
#endif

struct Workspace {
  int64_t floats = 0;
  // rows: groups of R queries, each (key_width / 2, R, 2). lanes: Vecs of queries, each (key_width / 2, 16, 2).
  int16_t* q;
  int16_t* codes;  // (16, key_width)
  float* rotated;  // (16, key_width)
  float* factor;   // (lanes,): score / (codes of q . k)
  // (lanes,), latent: additional factor of the scores of the elements after the values.
  float* behind;
  float* scores;  // rows: (R, 256); lanes: (256, Vecs, 16); tiles: (groups of queries, 16, 256)
  int16_t*
      weights;      // rows: (groups, R, 256); lanes: (groups, 128, Vecs, 16, 2); tiles: (groups of queries, 2, 16, 256)
  float* k_scales;  // (groups of keys, 256)
  float* v_scales;  // (groups of values, 256)
  float* factors;   // (1 + groups, lanes)
  int16_t* keys;    // int8 codes of a span, converted to blocks of i16
  int16_t* values;  // the same; latent: (Vecs of columns, 128 pairs of positions, 16, 2)
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
    q = words(lanes * (cache.key_width + 2 * kQueryPadding));
    codes = words(kLanes * int64_t{cache.key_width});
    rotated = take(kLanes * int64_t{cache.key_width});
    factor = take(lanes);
    behind = take(lanes);
    scores = take(kSpan * kMostRows);
    const int64_t in_vectors = groups * kVectorRows;  // tiles have one group
    weights = words(kSpan * (in_vectors > kMostRows ? in_vectors : kMostRows));
    const int64_t most_groups = cache.key_width / 32 + 2;  // of keys
    k_scales = take(most_groups * kSpan);
    v_scales = take(groups * kSpan);
    factors = take((1 + groups) * lanes);
    keys = words(kSpan * int64_t{cache.key_width > 2 * kLanes ? cache.key_width : 2 * kLanes} + kKeyPadding);
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
  // Memory that is prefetched while the block's K is read, and the same for V.
  const uint8_t* after_k[kSpanBlocks];
  const uint8_t* after_v[kSpanBlocks];
  const float* k_scales;  // (groups, 256)
  const float* v_scales;
  // Codes from sixteen columns of V to the next, and from a pair of positions to the next.
  int64_t v_vecs, v_pairs;

  // The codes of column `column` in a block of V.
  template <class Code>
  const Code* values(int block, int64_t column) const {
    return codes_at<Code>(v[block], column / kLanes * v_vecs + column % kLanes * 2);
  }
};

// The key elements after the values: their first index, and the factors of their scores, (queries,).
struct Behind {
  int from;
  const float* factor;
};
Behind behind_of(const AttentionTask& task, const Workspace& work, int64_t row) {
  return {task.latent ? task.value_width : task.key_width, work.behind + row};
}

// The scales of a group of a block, in a cache of integers `Code`.
template <class Code>
CKDIST_INLINE Vec load_scales(const uint8_t* scales, int group) {
  if constexpr (sizeof(Code) == 1) return load_f16(reinterpret_cast<const uint16_t*>(scales) + group * kLanes);
  else return load(reinterpret_cast<const float*>(scales) + group * kLanes);
}

// The values of a latent cache: converts pairs of dimensions to pairs of positions, for blocks [first, last) of K.
template <class Key>
void values_of_keys(const Span& span, int width, int16_t* values) {
  for (int b = span.first; b < span.last; ++b) {
    const int64_t ahead = span.after_k[b] - span.k[b];
    for (int column = 0; column < width; column += kLanes) {
      const uint8_t* key = span.k[b] + int64_t{column} * kPairs * kPairBytes<Key>;
      for (int64_t line = 0; line < kPairBytes<Key> * kPairs * kBlockTokens; line += 64)
        __builtin_prefetch(key + ahead + line, 0, 2);
      transpose_pairs<Key>(key, width - column < kLanes ? width - column : kLanes,
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
    // A weight of 0 must give 0 for positions without a stored value. For stored values, K's scale shows if it is not
    // finite.
    for (int g = 0; g < shape.groups(); ++g) {
      const Vec scales = load_scales<Value>(at + layout.v_scales_offset, g);
      store(work.v_scales + g * kSpan + b * kLanes, select(less(abs(scales), set(3e38f)), scales, set(0.0f)));
    }
  }
  // While the keys of a span are read, its values are prefetched. While values are read, the keys of the next span are,
  // or the first keys of the next task.
  for (int b = span.first; b < span.last; ++b) {
    span.after_k[b] = span.v[b];
    const int64_t next = start / kBlockTokens + kSpanBlocks + b;
    if (next < blocks) span.after_v[b] = block(kSpanBlocks + b);
    else if (task.next_kv && b < task.next_blocks)
      span.after_v[b] = task.next_kv + task.next_table[b] * task.block_stride;
    else span.after_v[b] = span.v[b];
    if (next < blocks)  // its scales are read at once
      for (int64_t at = layout.k_scales_offset; at < layout.bytes; at += 64)
        __builtin_prefetch(span.after_v[b] + at, 0, 2);
  }
  if (task.latent) {  // the keys of the next span are prefetched while values are made of these
    for (int b = span.first; b < span.last; ++b) {
      span.after_k[b] = start / kBlockTokens + kSpanBlocks + b < blocks ? block(kSpanBlocks + b) : span.k[b];
      span.v[b] = span.after_v[b] = reinterpret_cast<const uint8_t*>(work.values + int64_t{b} * kBlockTokens * kLanes);
    }
    values_of_keys<Key>(span, task.value_width, work.values);
  }
  return span;
}

// First position of the span that the query in `row` sees, and one past the last.
CKDIST_INLINE void seen(const AttentionTask& task, int64_t start, int64_t row, int* low, int* high) {
  const int64_t position = task.first_position + row / task.heads;
  const int64_t from = task.from(position) - start, to = task.to(position) - start;
  *low = static_cast<int>(from < 0 ? 0 : from > kSpan ? kSpan : from);
  *high = static_cast<int>(to < 0 ? 0 : to > kSpan ? kSpan : to);
}

// soft_cap 0: no cap.
CKDIST_INLINE Vec cap(Vec score, float soft_cap) {
  return soft_cap > 0.0f ? set(soft_cap) * tanh(score / set(soft_cap)) : score;
}

CKDIST_INLINE Vec lane_numbers() {
  static const float lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}

// The factor of weights before they are multiplied by their scales of V and rounded, for sixteen queries. `unit` is its
// inverse.
template <class Code>
CKDIST_INLINE Vec weigh(Vec sum, Vec largest_scale, Vec* unit) {
  Vec factor = set(kLargestCode / 65536.0f);
  if constexpr (sizeof(Code) == 2) factor = min(set(kMostWeight) / sum, factor);
  const Vec scale = select(less(largest_scale, set(1e-36f)), set(1.0f), largest_scale);  // all values are zero
  *unit = scale / factor;
  return factor / scale;
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
