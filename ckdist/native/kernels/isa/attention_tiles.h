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
constexpr int kTileCodes = kTileRowBytes;                       // codes that a product sums
constexpr int kHalvesBytes = 2 * kTileRowBytes;                 // a line of high bytes and a line of low bytes
constexpr int kCodesBytes = kTileMostRows * kHalvesBytes;       // codes of one product
constexpr int kValuesBytes = kSpan / kTileCodes * kCodesBytes;  // sixteen columns of a span's values
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

// Writes the codes of a query, (key_width,), to its row of a group of queries: all rows of high bytes, then all rows of
// low bytes.
CKDIST_INLINE void lay_out_query(const CacheShape& cache, const int16_t* codes, uint8_t* high, uint8_t* low) {
  for (int g = 0; g < key_groups(cache); ++g) {
    const KeyGroup of(cache, g);
    for (int i = of.first, at = of.at; i < of.last; i += 32, at += 32) {
      const int left = of.last - i;
      const __m512i words = _mm512_maskz_loadu_epi16(left < 32 ? (1u << left) - 1 : 0xffffffffu, codes + i);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + at), _mm512_cvtepi16_epi8(words));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + at), _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
    }
    const int rest = of.products() * kTileCodes - (of.last - of.first + 31) / 32 * 32;
    std::memset(high + of.at + of.products() * kTileCodes - rest, 0, rest);
    std::memset(low + of.at + of.products() * kTileCodes - rest, 0, rest);
  }
}

// Stores the high and low bytes of 64 codes, which are in lanes of 32 bits.
CKDIST_INLINE void store_halves(const __m512i* codes, uint8_t* high, uint8_t* low) {
  alignas(64) static constexpr uint8_t kFirst[64] = {0,  4,  8,  12,  16,  20,  24,  28,  32,  36, 40,
                                                     44, 48, 52, 56,  60,  64,  68,  72,  76,  80, 84,
                                                     88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
  const __m512i lows = _mm512_load_si512(kFirst), highs = _mm512_or_si512(lows, _mm512_set1_epi8(1));
  const auto pack = [&](__m512i index) {
    return _mm512_inserti64x4(_mm512_permutex2var_epi8(codes[0], index, codes[1]),
                              _mm512_castsi512_si256(_mm512_permutex2var_epi8(codes[2], index, codes[3])), 1);
  };
  _mm512_storeu_si512(low, pack(lows));
  _mm512_storeu_si512(high, pack(highs));
}

// Splits two lines of pairs of codes (the first two and the next two that a product sums) into a line of high bytes and
// a line of low bytes.
CKDIST_INLINE void split_lines(const void* first, const void* second, uint8_t* to) {
  const __m512i lanes =
      _mm512_set_epi32(0x3c3c3c3c, 0x38383838, 0x34343434, 0x30303030, 0x2c2c2c2c, 0x28282828, 0x24242424, 0x20202020,
                       0x1c1c1c1c, 0x18181818, 0x14141414, 0x10101010, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m512i low = _mm512_or_si512(lanes, _mm512_set1_epi32(0x42400200)),
                high = _mm512_or_si512(lanes, _mm512_set1_epi32(0x43410301));
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi8(a, high, b));
  _mm512_storeu_si512(to + kTileRowBytes, _mm512_permutex2var_epi8(a, low, b));
}

// Converts a row of scores to weights, padded to whole products.
CKDIST_INLINE void weigh_halves(const QueryGroup& group, const float* scores, const float* v_scales, Vec factor,
                                uint8_t* high, uint8_t* low) {
  const int from = group.first * kLanes, to = group.last * kLanes;
  for (int i = from / kTileCodes * kTileCodes; i < to; i += kTileCodes) {
    __m512i codes[4];
    for (int j = 0; j < 4; ++j) {
      const int at = i + j * kLanes;
      codes[j] = at < from || at >= to ? _mm512_setzero_si512()
                                       : _mm512_cvtps_epi32(((load(scores + at) * factor) * load(v_scales + at)).v);
    }
    store_halves(codes, high + i, low + i);
  }
}

// Products of `steps` times 64 codes of 16 rows with two times 16 columns, which are `apart` bytes apart. sums:
// [columns][high by high; high by low and low by high; low by low][row][column].
CKDIST_INLINE void multiply_codes(const uint8_t* high, const uint8_t* low, int64_t stride, const uint8_t* codes,
                                  int64_t apart, int steps, int32_t* sums) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_zero<4>();
  tile_zero<5>();
  for (int s = 0; s < steps; ++s, high += kTileCodes, low += kTileCodes, codes += kCodesBytes) {
    constexpr int row = 6, column = 7;
    const uint8_t *second = codes + apart, *lows = codes + kTileRowBytes, *second_lows = second + kTileRowBytes;
    tile_load<row>(high, stride);
    tile_load<column>(codes, kHalvesBytes);
    tile_dot_bytes<0, row, column>();
    tile_load<column>(lows, kHalvesBytes);
    tile_dot_bytes<1, row, column, true, false>();
    tile_load<column>(second, kHalvesBytes);
    tile_dot_bytes<3, row, column>();
    tile_load<column>(second_lows, kHalvesBytes);
    tile_dot_bytes<4, row, column, true, false>();
    tile_load<row>(low, stride);
    tile_dot_bytes<5, row, column, false, false>();
    tile_load<column>(second, kHalvesBytes);
    tile_dot_bytes<4, row, column, false, true>();
    tile_load<column>(codes, kHalvesBytes);
    tile_dot_bytes<1, row, column, false, true>();
    tile_load<column>(lows, kHalvesBytes);
    tile_dot_bytes<2, row, column, false, false>();
  }
  tile_store<0>(sums, kTileRowBytes);
  tile_store<1>(sums + kSums, kTileRowBytes);
  tile_store<2>(sums + 2 * kSums, kTileRowBytes);
  tile_store<3>(sums + 3 * kSums, kTileRowBytes);
  tile_store<4>(sums + 4 * kSums, kTileRowBytes);
  tile_store<5>(sums + 5 * kSums, kTileRowBytes);
}

// Combines the products of one row with the first or second columns. The shifts may drop bits, but the sum stays below
// 2^31.
CKDIST_INLINE Vec sums_of_row(const int32_t* sums, int columns, int row) {
  const int32_t* at = sums + (columns * 3 * kTileMostRows + row) * kLanes;
  const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(at), 8), _mm512_load_si512(at + kSums));
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), _mm512_load_si512(at + 2 * kSums)))};
}

// Several groups of queries and one span. Keys and values are split just before use, so that they are in the L1 cache.
// For blocks that are not in use, and columns beyond the width, the buffers hold old data: their weights are 0, or
// their sums are not read.
class TileSpan {
 public:
  TileSpan(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span, const SpanPart& part)
      : task_(task), shape_(shape), work_(work), span_(span), part_(part), cache_(task.cache()) {}

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
  template <class Done>
  void attend(Done&& done) const {
    if (count_ == 0) return;
    int first = kSpanBlocks, last = 0;
    for (int i = 0; i < count_; ++i) {
      first = groups_[i].first < first ? groups_[i].first : first;
      last = groups_[i].last > last ? groups_[i].last : last;
    }
    for (int b = first / 2 * 2; b < last; b += 2) score(b);
    for (int i = 0; i < count_; ++i) soften(i);
    for (int column = 0; column < shape_.width; column += 2 * kLanes) accumulate(column, first, last);
    for (int i = 0; i < count_; ++i) done(groups_[i].row, groups_[i].row + kTileQueries);
  }

 private:
  float* scores(int i) const { return work_.scores + i * kTileQueries * kSpan; }
  uint8_t* weights(int i) const { return reinterpret_cast<uint8_t*>(work_.weights) + i * 2 * kTileQueries * kSpan; }

  // Scores of all groups for blocks b and b + 1.
  void score(int b) const {
    alignas(64) int32_t sums[6 * kSums];
    uint8_t* const keys = reinterpret_cast<uint8_t*>(work_.keys);
    const int64_t block_bytes = int64_t{2} * kBlockTokens * task_.key_width, stride = row_bytes(cache_);
    for (int i = 0; i < 2; ++i) {
      if (b + i < span_.first || b + i >= span_.last) continue;
      const uint8_t *from = span_.k[b + i], *after = span_.after_k[b + i];
      for (int64_t at = 0; at < block_bytes; at += kHalvesBytes) {
        split_lines(from + at, from + at + kTileRowBytes, keys + i * block_bytes + at);
        if (task_.latent) continue;  // the next data is already prefetched
        __builtin_prefetch(after + at, 0, 2);
        __builtin_prefetch(after + at + kTileRowBytes, 0, 2);
      }
    }
    for (int g = 0; g < key_groups(cache_); ++g) {
      const KeyGroup of(cache_, g);
      const float* scales = span_.k_scales + g * kSpan + b * kLanes;
      for (int i = 0; i < count_; ++i) {
        const QueryGroup& group = groups_[i];
        if (b + 1 < group.first || b >= group.last) continue;
        const uint8_t* queries = reinterpret_cast<const uint8_t*>(work_.q) + 2 * group.row * stride + of.at;
        multiply_codes(queries, queries + kTileQueries * stride, stride, keys + of.first / 4 * kHalvesBytes,
                       block_bytes, of.products(), sums);
        const Behind behind = behind_of(task_, work_, group.row);
        float* score = scores(i) + b * kLanes;
        for (int r = 0; r < group.rows; ++r, score += kSpan) {
          for (int j = 0; j < 2; ++j) {
            Vec scale = load(scales + j * kLanes);
            if (of.first >= behind.from) scale = scale * set(behind.factor[r]);
            store(score + j * kLanes,
                  fma(sums_of_row(sums, j, r), scale, g > 0 ? load(score + j * kLanes) : set(0.0f)));
          }
        }
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

  // Two times sixteen columns of all groups' values, over blocks [first, last).
  void accumulate(int column, int first, int last) const {
    alignas(64) int32_t sums[6 * kSums];
    uint8_t* const values = reinterpret_cast<uint8_t*>(work_.keys);
    const int64_t next_pair = 2 * span_.v_pairs, next_lanes = 2 * span_.v_vecs;  // in bytes
    const int count = shape_.width - column < 2 * kLanes ? 1 : 2;
    for (int j = 0; j < count; ++j) {
      uint8_t* to = values + j * kValuesBytes + first * kBlockTokens / 4 * kHalvesBytes;
      for (int b = first; b < last; ++b) {
        const uint8_t* v = span_.v[b] + (column / kLanes + j) * next_lanes;
        const int64_t ahead = span_.after_v[b] - span_.v[b];
        for (int pair = 0; pair < kBlockTokens / 2; pair += 2, v += 2 * next_pair, to += kHalvesBytes) {
          split_lines(v, v + next_pair, to);
          __builtin_prefetch(v + ahead, 0, 2);
          __builtin_prefetch(v + next_pair + ahead, 0, 2);
        }
      }
    }
    for (int i = 0; i < count_; ++i) {
      const QueryGroup& group = groups_[i];
      const int begin = group.first * kBlockTokens / kTileCodes,
                end = (group.last * kBlockTokens + kTileCodes - 1) / kTileCodes;
      const uint8_t* high = weights(i) + begin * kTileCodes;
      multiply_codes(high, high + kTileQueries * kSpan, kSpan, values + begin * kCodesBytes, kValuesBytes, end - begin,
                     sums);
      float* out = part_.values + group.row * shape_.width + column;
      for (int r = 0; r < group.rows; ++r, out += shape_.width)
        for (int j = 0; j < count; ++j) store(out + j * kLanes, sums_of_row(sums, j, r));
    }
  }

  const AttentionTask& task_;
  const Shape& shape_;
  const Workspace& work_;
  const Span& span_;
  const SpanPart& part_;
  const CacheShape cache_;
  int count_ = 0;
  QueryGroup groups_[kMostGroups];
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

// Calls done(first query, last query) for every sixteen queries that see the span.
template <class Done>
void attend_tiles(const AttentionTask& task, const Shape& shape, const Workspace& work, const Span& span,
                  const SpanPart& part, Done&& done) {
  const TilesInUse configured;
  TileSpan tiles(task, shape, work, span, part);
  for (int64_t row = 0; row < shape.queries;) {
    row = tiles.take(row);
    tiles.attend(done);
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
