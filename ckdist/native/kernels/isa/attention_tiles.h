// Many queries over a span of a cache of 16-bit integers, with AMX. Tiles multiply bytes. So a code is a signed high
// byte and an unsigned low byte, and a product of codes is four products of bytes. The sums are exact, so the bits are
// those of vectors. A row of a tile is one query in all steps. Private to isa/.
#pragma once
#include "kernels/isa/attention_soften.h"
#include "kernels/isa/tile.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kTileQueries = kTileMostRows;
constexpr int kTileCodes = kTileRowBytes;                  // codes that a product sums
constexpr int kHalvesBytes = 2 * kTileRowBytes;            // a line of high bytes and a line of low bytes
constexpr int kCodesBytes = kTileMostRows * kHalvesBytes;  // codes of one product
constexpr int kSums = kTileMostRows * kLanes;

// Dimensions [first, last) of a key that share a scale, and the offset of their high bytes in a row of a query. In a
// row each group has whole products.
struct KeyGroup {
  int first, last, at;

  KeyGroup(const CacheShape& cache, int group) : first(0), last(key_group(cache)), at(0) {
    for (; group > 0; --group) at += products() * kTileCodes, first = last, last += key_group(cache);
    if (last > cache.key_width) last = cache.key_width;
  }
  int products() const { return (last - first + kTileCodes - 1) / kTileCodes; }
};
CKDIST_INLINE int row_bytes(const CacheShape& cache) {
  const KeyGroup end(cache, key_groups(cache) - 1);
  return end.at + end.products() * kTileCodes;
}

// Splits two lines of pairs of codes into a line of high bytes and a line of low bytes. A lane of each has four codes,
// which a product sums. Their order is free, but both factors must have the same one: the pairs' codes alternate.
CKDIST_INLINE void split_lines(__m512i first, __m512i second, uint8_t* high, uint8_t* low) {
  constexpr int or_and = 0xf8, or_and_not = 0xf4;  // truth tables of a | (b & c) and a | (b & ~c)
  const __m512i lows = _mm512_set1_epi16(0xff);
  _mm512_storeu_si512(high, _mm512_ternarylogic_epi32(_mm512_srli_epi16(first, 8), second, lows, or_and_not));
  _mm512_storeu_si512(low, _mm512_ternarylogic_epi32(_mm512_slli_epi16(second, 8), first, lows, or_and));
}

// Writes the codes of a query, (key_width,), to its row of a group of queries: all rows of high bytes, then all rows of
// low bytes. The codes of a product are two lines.
CKDIST_INLINE void lay_out_query(const CacheShape& cache, const int16_t* codes, uint8_t* high, uint8_t* low) {
  const auto line = [&](int from, int end) {
    const int left = end - from;
    return _mm512_maskz_loadu_epi16(left < 0 ? 0 : left < 32 ? (1u << left) - 1 : 0xffffffffu, codes + from);
  };
  for (int g = 0; g < key_groups(cache); ++g) {
    const KeyGroup of(cache, g);
    for (int i = of.first, at = of.at; i < of.last; i += kTileCodes, at += kTileCodes)
      split_lines(line(i, of.last), line(i + kTileCodes / 2, of.last), high + at, low + at);
  }
}

// Splits the keys of a block, for all products of a row.
CKDIST_INLINE void split_keys(const CacheShape& cache, const uint8_t* block, uint8_t* to) {
  const auto line = [&](int i) { return _mm512_loadu_si512(block + int64_t{i} * 2 * kLanes); };  // of dimension i
  for (int g = 0; g < key_groups(cache); ++g) {
    const KeyGroup of(cache, g);
    for (int p = 0; p < of.products(); ++p, to += kCodesBytes) {
      const int first = of.first + p * kTileCodes, second = first + kTileCodes / 2;
      for (int i = 0; i < kTileCodes / 2 && first + i < of.last; i += 2)
        split_lines(line(first + i), second + i < of.last ? line(second + i) : _mm512_setzero_si512(),
                    to + i / 2 * kHalvesBytes, to + i / 2 * kHalvesBytes + kTileRowBytes);
    }
  }
}

// Converts a row of scores to weights, padded to whole products. Two lines of a product are blocks 0 and 1, and blocks
// 2 and 3, of 64 positions.
CKDIST_INLINE void weigh_halves(const QueryGroup& group, const float* scores, const float* v_scales, Vec factor,
                                uint8_t* high, uint8_t* low) {
  const int from = group.first * kLanes, to = group.last * kLanes;
  const auto weigh = [&](auto codes) CKDIST_INLINED {
    for (int i = from / kTileCodes * kTileCodes; i < to; i += kTileCodes)
      split_lines(_mm512_packs_epi32(codes(i), codes(i + kLanes)),
                  _mm512_packs_epi32(codes(i + 2 * kLanes), codes(i + 3 * kLanes)), high + i, low + i);
  };
  const auto codes = [&](int at) CKDIST_INLINED {
    return _mm512_cvtps_epi32(((load(scores + at) * factor) * load(v_scales + at)).v);
  };
  if ((from | to) % kTileCodes == 0) weigh(codes);
  else weigh([&](int at) CKDIST_INLINED { return at < from || at >= to ? _mm512_setzero_si512() : codes(at); });
}

// Products of `steps` times 64 codes of 16 rows with 16 columns. sums: [high by high; high by low and low by high; low
// by low][row][column]. After each product, combines `each` rows of the pending sums, which may be the same memory. A
// factor is loaded just before its first product.
template <int each, class Pending>
CKDIST_INLINE void add_products(const uint8_t* high, const uint8_t* low, int64_t stride, const uint8_t* codes,
                                int steps, int32_t* sums, const Pending& pending) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  int row = 0;
  for (int s = 0; s < steps; ++s, high += kTileCodes, low += kTileCodes, codes += kCodesBytes) {
    tile_load<3>(high, stride);
    tile_load<4>(codes, kHalvesBytes);
    tile_dot_bytes<0, 3, 4>();
    tile_load<5>(low, stride);
    pending.combine(row, row + each);
    tile_dot_bytes<1, 5, 4, false, true>();
    tile_load<6>(codes + kTileRowBytes, kHalvesBytes);
    pending.combine(row + each, row + 2 * each);
    tile_dot_bytes<2, 5, 6, false, false>();
    pending.combine(row + 2 * each, row + 3 * each);
    tile_dot_bytes<1, 3, 6, true, false>();
    pending.combine(row + 3 * each, row + 4 * each);
    row += 4 * each;
  }
  tile_store<0>(sums, kTileRowBytes);
  tile_store<2>(sums + 2 * kSums, kTileRowBytes);
  tile_store<1>(sums + kSums, kTileRowBytes);
}
template <class Pending>
void multiply_codes(const uint8_t* high, const uint8_t* low, int64_t stride, const uint8_t* codes, int steps,
                    int32_t* sums, const Pending& pending) {
  if (steps == 1) add_products<4>(high, low, stride, codes, steps, sums, pending);
  else if (steps < 4) add_products<2>(high, low, stride, codes, steps, sums, pending);
  else add_products<1>(high, low, stride, codes, steps, sums, pending);
}

// Combines the products of one row. The shifts may drop bits, but the sum stays below 2^31.
CKDIST_INLINE Vec sums_of_row(const int32_t* sums, int row) {
  const int32_t* at = sums + row * kLanes;
  const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(at), 8), _mm512_load_si512(at + kSums));
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), _mm512_load_si512(at + 2 * kSums)))};
}

// Sums of a group that are still to be combined, which is done while the tiles multiply the next group.
struct PendingScores {
  const int32_t* sums = nullptr;
  int rows = 0;
  bool add = false;  // to the scores of earlier groups of keys
  float* scores = nullptr;
  Vec scale;
  const float* factors = nullptr;  // (rows,), or null

  void combine(int first, int last) const {
    for (int r = first; r < last && r < rows; ++r) {
      float* score = scores + r * kSpan;
      store(score, fma(sums_of_row(sums, r), factors ? scale * set(factors[r]) : scale, add ? load(score) : set(0.0f)));
    }
  }
};
// A group's values of a span, to be written as they are, or merged into the state or the result.
struct ValueRows {
  float* to[kTileQueries];
  const float* before = nullptr;  // (rows, width): the state; null: there is none yet
  int64_t width;
  bool merged = false;   // values = before * kept + sums * unit
  bool divided = false;  // values * inverse, the result
  alignas(64) float kept[kTileQueries], unit[kTileQueries], inverse[kTileQueries];
};
struct PendingValues {
  const int32_t* sums = nullptr;
  int rows = 0, column = 0, lanes = kLanes;
  const ValueRows* group = nullptr;

  void combine(int first, int last) const {
    for (int r = first; r < last && r < rows; ++r) {
      const ValueRows& of = *group;
      Vec values = sums_of_row(sums, r);
      if (of.merged)
        values = fma(of.before ? load(of.before + r * of.width + column) : set(0.0f), set(of.kept[r]),
                     values * set(of.unit[r]));
      if (of.divided) store_n(of.to[r] + column, values * set(of.inverse[r]) + set(0.0f), lanes);  // no -0
      else store(of.to[r] + column, values);
    }
  }
};

// Several groups of queries and one span. Keys and values are split just before use, so that they are in the L1 cache.
// For blocks that are not in use, and columns beyond the width, the buffers hold old data: their weights are 0, or
// their sums are not read.
class TileSpan {
 public:
  // state: the spans before this one, which it is merged into; null: the part gets its values.
  TileSpan(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span, const SpanPart& part,
           const SpanPart* state)
      : task_(task), shape_(shape), work_(work), span_(span), part_(part), state_(state), cache_(task.cache()) {}

  // Takes groups from `row` on that see the span. Returns the first row that is not taken.
  int64_t take(int64_t row) {
    for (count_ = 0; row < shape_.queries && count_ < kMostGroups; row += kTileQueries) {
      const int64_t left = shape_.queries - row;
      groups_[count_] =
          QueryGroup(task_, span_.start, row, left < kTileQueries ? static_cast<int>(left) : kTileQueries);
      count_ += groups_[count_].first < groups_[count_].last;
    }
    return row;
  }
  void attend() {
    if (count_ == 0) return;
    int first = kSpanBlocks, last = 0;
    for (int i = 0; i < count_; ++i) {
      first = groups_[i].first < first ? groups_[i].first : first;
      last = groups_[i].last > last ? groups_[i].last : last;
    }
    PendingScores scores;
    for (int b = first; b < last; ++b) score(b, scores);
    scores.combine(0, kTileQueries);
    for (int i = 0; i < count_; ++i) {
      soften(i);
      direct_values(i);
    }
    PendingValues values;
    for (int column = 0; column < shape_.width; column += kLanes) accumulate(column, first, last, values);
    values.combine(0, kTileQueries);
  }

 private:
  float* scores(int i) const { return work_.scores + i * kTileQueries * kSpan; }
  uint8_t* weights(int i) const { return reinterpret_cast<uint8_t*>(work_.weights) + i * 2 * kTileQueries * kSpan; }

  // Scores of all groups for block b.
  void score(int b, PendingScores& pending) {
    uint8_t* const keys = reinterpret_cast<uint8_t*>(work_.keys);
    const int64_t stride = row_bytes(cache_);
    split_keys(cache_, span_.k[b], keys);
    if (!task_.latent)  // else the next data is already prefetched
      for (int64_t at = 0; at < int64_t{2} * kBlockTokens * task_.key_width; at += 64)
        __builtin_prefetch(span_.after_k[b] + at, 0, 2);
    for (int g = 0; g < key_groups(cache_); ++g) {
      const KeyGroup of(cache_, g);
      const Vec scale = load(span_.k_scales + g * kSpan + b * kLanes);
      for (int i = 0; i < count_; ++i) {
        const QueryGroup& group = groups_[i];
        if (b < group.first || b >= group.last) continue;
        const uint8_t* queries = reinterpret_cast<const uint8_t*>(work_.q) + 2 * group.row * stride + of.at;
        multiply_codes(queries, queries + kTileQueries * stride, stride, keys + of.at / kTileCodes * kCodesBytes,
                       of.products(), sums_, pending);
        const Behind behind = behind_of(task_, work_, group.row);
        pending.sums = sums_;
        pending.rows = group.rows;
        pending.add = g > 0;
        pending.scores = scores(i) + b * kLanes;
        pending.scale = scale;
        pending.factors = of.first >= behind.from ? behind.factor : nullptr;
      }
    }
  }

  void soften(int i) const {
    const QueryGroup& group = groups_[i];
    const auto weigh_row = [&](int, int r, Vec factor) {
      uint8_t* high = weights(i) + r * kSpan;
      weigh_halves(group, scores(i) + r * kSpan, span_.v_scales, factor, high, high + kTileQueries * kSpan);
    };
    soften_rows<int16_t>(task_, shape_, work_, span_, part_, group, scores(i), weigh_row);
  }

  // Chooses where the values of a group go. The last span that the group sees completes the result.
  void direct_values(int i) {
    const QueryGroup& group = groups_[i];
    const int64_t row = group.row, width = shape_.width;
    ValueRows& of = values_[i];
    const auto position = [&](int64_t r) { return task_.first_position + r / task_.heads; };
    of.width = width;
    of.merged = state_ != nullptr;
    of.divided = state_ && task_.to(position(row + group.rows - 1)) <= span_.start + kSpan;
    if (state_) {
      merge_lanes(shape_, part_, *state_, work_.factors, row, row + kTileQueries);
      of.before = task_.from(position(row)) < span_.start ? state_->values + row * width : nullptr;
      store(of.kept, load(work_.factors + row));
      store(of.unit, load(work_.factors + shape_.lanes + row));
      if (of.divided) store(of.inverse, inverse_sums(task_, shape_, *state_, row));
    }
    float* const values = (state_ ? state_->values : part_.values) + row * width;
    for (int r = 0; r < group.rows; ++r) {
      of.to[r] = values + r * width;
      if (!of.divided) continue;
      of.to[r] = task_.out + (row + r) / task_.heads * task_.out_token_stride +
                 (row + r) % task_.heads * task_.out_head_stride;
      for (int column = 0; column < task_.value_width; column += kLanes) __builtin_prefetch(of.to[r] + column, 1);
    }
  }

  // Splits sixteen columns of the values of positions [64 p, 64 p + 64), in the order of weigh_halves().
  void split_values(int column, int p, uint8_t* to) const {
    const int64_t next_pair = 2 * span_.v_pairs, vec = 2 * span_.v_vecs;  // in bytes
    const auto used = [&](int b) { return b >= span_.first && b < span_.last; };
    for (int half = 0; half < 2; ++half, to += 2 * kHalvesBytes) {
      int first = p * kTileCodes / kBlockTokens + half, second = first + 2;
      if (!used(first)) first = second;
      if (!used(second)) second = first;
      if (!used(first)) continue;
      const uint8_t *v = span_.v[first] + column / kLanes * vec, *w = span_.v[second] + column / kLanes * vec;
      const uint8_t *after_v = v + (span_.after_v[first] - span_.v[first]),
                    *after_w = w + (span_.after_v[second] - span_.v[second]);
      for (int pair = 0; pair < kBlockTokens / 2; ++pair) {
        uint8_t* line = to + (pair / 2 * 4 + pair % 2) * kHalvesBytes;
        split_lines(_mm512_loadu_si512(v + pair * next_pair), _mm512_loadu_si512(w + pair * next_pair), line,
                    line + kTileRowBytes);
        __builtin_prefetch(after_v + pair * next_pair, 0, 2);
        __builtin_prefetch(after_w + pair * next_pair, 0, 2);
      }
    }
  }

  // Sixteen columns of all groups' values, over blocks [first, last).
  void accumulate(int column, int first, int last, PendingValues& pending) {
    uint8_t* const values = reinterpret_cast<uint8_t*>(work_.keys);
    constexpr int blocks = kTileCodes / kBlockTokens;
    for (int p = first / blocks; p * blocks < last; ++p) split_values(column, p, values + p * kCodesBytes);
    for (int i = 0; i < count_; ++i) {
      const QueryGroup& group = groups_[i];
      const int begin = group.first / blocks, end = (group.last + blocks - 1) / blocks;
      const uint8_t* high = weights(i) + begin * kTileCodes;
      multiply_codes(high, high + kTileQueries * kSpan, kSpan, values + begin * kCodesBytes, end - begin, sums_,
                     pending);
      pending.sums = sums_;
      pending.rows = group.rows;
      pending.column = column;
      pending.lanes = task_.value_width - column < kLanes ? task_.value_width - column : kLanes;
      pending.group = &values_[i];
    }
  }

  const AttentionTask& task_;
  const Shape& shape_;
  const Workspace& work_;
  const Span& span_;
  const SpanPart& part_;
  const SpanPart* state_;
  const CacheShape cache_;
  int count_ = 0;
  QueryGroup groups_[kMostGroups];
  ValueRows values_[kMostGroups];
  alignas(64) int32_t sums_[3 * kSums];
};

// Configures the tiles during its lifetime.
struct TilesInUse {
  TilesInUse() {
    TileShapes shapes;
    for (int tile = 0; tile < kTiles; ++tile) shapes.set(tile, kTileMostRows, kTileRowBytes);
    tile_configure(shapes);
  }
  ~TilesInUse() { tile_release(); }
};

// Attends to one span, and merges it into the state. Without a state, the part gets the values.
void attend_tiles(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                  const SpanPart& part, const SpanPart* state) {
  const TilesInUse configured;
  TileSpan tiles(task, shape, work, span, part, state);
  for (int64_t row = 0; row < shape.queries;) {
    row = tiles.take(row);
    tiles.attend();
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
