// Training's large products in bfloat16 with AMX: both operands are in the order of tiles (StripKernel).
//
// A block is 512 columns of a strip (32 KB, in the L1 cache) and of 256 rows of the matrix (256 KB, in the L2 cache,
// from which tiles are streamed past the L1 cache). Between blocks, sums wait in memory as whole tiles. Every step
// prefetches a part of the next strip, and of the rows' next block. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"
#include "kernels/isa/tile_steps.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t kTileBytes = kTileMostRows * kTileRowBytes, kStepOfStrip = 2 * kTileBytes;
constexpr int64_t kStripsPairs = kStripsTiles / 2, kBlockSteps = 16;
// A segment of up to this number of steps is one block: if another thread of the core shares its caches, sums that wait
// take longer than a strip that does not fit the L1 cache.
constexpr int64_t kWholeSteps = 24;
constexpr int kPairSums = kSumsTiles * kTileSums;  // floats
constexpr TileStrip kWholeStrip{kTokensAtOnce, 2, 2 * kTileRows, nullptr, 0};

// Steps [first, first + steps) of the columns. A segment is summed separately; its sums are added to those before it.
struct StripBlock {
  int64_t first, steps, segment, segment_end;

  bool begins_segment() const { return first == segment; }
  bool ends_segment() const { return first + steps == segment_end; }
};

// Blocks of a segment are as even as possible.
inline StripBlock block_from(int64_t first, const StripBlock& before, int64_t segment_steps, int64_t all) {
  StripBlock b{first, 0, before.segment, before.segment_end};
  if (first == b.segment_end) b.segment = first, b.segment_end = least(first + segment_steps, all);
  const int64_t left = b.segment_end - first,
                blocks = left > kWholeSteps || first > b.segment ? (left + kBlockSteps - 1) / kBlockSteps : left > 0;
  b.steps = blocks ? (left + blocks - 1) / blocks : 0;
  return b;
}

// `half`: the last step has 16 columns of the matrix.
inline void add_steps_of_strip(TileSteps at, bool half, FetchTwo later_tiles, FetchTwo later_strip) {
  if (!half) return add_steps(at, later_tiles, later_strip);
  alignas(64) uint8_t ends[2][kTileBytes] = {};
  TileSteps last = at;
  --at.count, last.count = 1;
  add_steps(at, later_tiles, later_strip);
  last.x += at.count * last.x_bytes, last.weights += at.count * last.step_bytes;
  std::memcpy(ends[0], last.weights, kTileBytes / 2);
  std::memcpy(ends[1], last.weights + last.tile_bytes, kTileBytes / 2);
  last.weights = ends[0], last.tile_bytes = kTileBytes;
  add_steps(last);
}

// The sums of a segment for a strip and a pair of tiles, [tile of sums][16][16], and `totals` of the segments before
// it.
struct PairSums {
  const float* sums;
  float* totals;
  bool first, last;  // of the segments
  int64_t token, column;
  int tokens, columns;

  // Vector `tile` of a token.
  static int64_t place(int token, int tile) {
    return (token / kStripTokens * 2 + tile) * kTileSums + token % kStripTokens * kTileRows;
  }
};

// The operands of a product, with at most kStripsTiles tiles and kStripsTokens tokens.
struct StripProduct {
  const Matrix& matrix;
  const uint8_t* strips;
  int64_t tokens;
  const uint8_t* next;
  float *waiting, *totals;  // [strip][pair][tile of sums][16][16]: of a segment, and of the segments before it

  StripProduct(const Matrix& m, const uint8_t* x, int64_t n, const uint8_t* after, float* sums)
      : matrix(m), strips(x), tokens(n), next(after), waiting(sums), totals(sums + kStripsSums / 2) {}

  int64_t half_steps() const { return (matrix.cols + 15) / 16; }
  int64_t steps() const { return (half_steps() + 1) / 2; }
  int64_t count() const { return (tokens + kStripRows - 1) / kStripRows; }
  int64_t pairs() const { return (matrix.tile_count() + 1) / 2; }
  const uint8_t* strip_at(int64_t strip, int64_t step) const {
    return strips + strip * strip_bytes(matrix.cols) + step * kStepOfStrip;
  }

  // Multiplies a block of a strip by all pairs of tiles. take(PairSums) takes the sums of a segment.
  template <class Take>
  void multiply(const StripBlock& b, int64_t strip, Take&& take) const {
    alignas(64) float sums[kPairSums];
    const bool last_strip = strip + 1 == count(), last_block = b.first + b.steps == steps();
    const bool half = last_block && half_steps() % 2;
    const uint8_t* const next_strip =
        last_strip ? strip_at(0, last_block ? 0 : b.first + b.steps) : strip_at(strip + 1, b.first);
    const uint8_t* const next_tiles = last_block ? next : matrix.tiles + (b.first + b.steps) * kTileBytes;
    PairSums own{sums,
                 nullptr,
                 b.segment == 0,
                 b.segment_end == steps(),
                 strip * kStripRows,
                 0,
                 static_cast<int>(least(kStripRows, tokens - strip * kStripRows)),
                 0};
    for (int64_t pair = 0; pair < pairs(); ++pair) {
      const int64_t at = (strip * kStripsPairs + pair) * kPairSums;
      const int64_t apart = 2 * pair + 1 < matrix.tile_count() ? matrix.tile_bytes : 0;
      const uint8_t* const tiles = matrix.tiles + 2 * pair * matrix.tile_bytes + b.first * kTileBytes;
      const int64_t bytes = b.steps * kTileBytes;
      const FetchTwo later_tiles(next_tiles ? next_tiles + 2 * pair * matrix.tile_bytes : nullptr, apart, bytes, strip,
                                 count(), b.steps),
          later_strip(next_strip, bytes, bytes, pair, pairs(), b.steps);
      if (b.begins_segment()) zero_sums(2);
      else load_tiles(kWholeStrip, waiting + at);
      add_steps_of_strip(
          {tiles, kTileBytes, apart, strip_at(strip, b.first), kStepOfStrip, kTileBytes, kTileRowBytes, b.steps}, half,
          later_tiles, later_strip);
      store_tiles(kWholeStrip, b.ends_segment() ? sums : waiting + at);
      if (!b.ends_segment()) continue;
      own.totals = totals + at, own.column = 2 * pair * kTileRows;
      own.columns = static_cast<int>(least(2 * kTileRows, matrix.rows - own.column));
      take(own);
    }
  }
};

template <class Take>
CKDIST_INLINE void multiply_segments(const StripProduct& p, int64_t segment_steps, Take&& take) {
  configure(kTokensAtOnce, kTileRowBytes);
  for (StripBlock b = block_from(0, {}, segment_steps, p.steps()); b.steps > 0;
       b = block_from(b.first + b.steps, b, segment_steps, p.steps()))
    for (int64_t strip = 0; strip < p.count(); ++strip) p.multiply(b, strip, take);
  tile_release();
}

// Adds the sums to those of earlier segments, and writes the last ones to the output.
CKDIST_INLINE void finish_pair(const ProductOutput& given, const PairSums& p) {
  const ProductOutput out = given;
  const bool whole = p.columns > kTileRows;
  const float* const bias = out.bias ? out.bias + p.column : nullptr;
  for (int t = 0; t < p.tokens; ++t) {
    const int64_t first = PairSums::place(t, 0), second = PairSums::place(t, 1);
    Vec one = CKDIST_VECTORS::load(p.sums + first), two = CKDIST_VECTORS::load(p.sums + second);
    if (!p.first)
      one = CKDIST_VECTORS::load(p.totals + first) + one, two = CKDIST_VECTORS::load(p.totals + second) + two;
    if (!p.last) {
      store(p.totals + first, one), store(p.totals + second, two);
      continue;
    }
    if (bias) one = one + CKDIST_VECTORS::load(bias);
    if (bias && whole) two = two + CKDIST_VECTORS::load(bias + kTileRows);
    if (out.residual) {
      const float* const residual = out.residual + (p.token + t) * out.residual_stride + p.column;
      one = one + load_n(residual, p.columns < kTileRows ? p.columns : kTileRows);
      if (whole) two = two + load_n(residual + kTileRows, p.columns - kTileRows);
    }
    uint8_t* const row = out.at + (p.token + t) * out.stride + p.column * (out.narrow ? 2 : 4);
    if (out.narrow && whole) {
      _mm512_storeu_si512(row, to_bf16(one, two));
    } else if (out.narrow) {
      store_bf16(reinterpret_cast<uint16_t*>(row), one);
    } else {
      store(reinterpret_cast<float*>(row), one);
      if (whole) store(reinterpret_cast<float*>(row) + kTileRows, two);
    }
  }
}

// The same, (+)= to y. Whole lines that are not read are written past the caches, since other steps read them.
CKDIST_INLINE void add_pair(float* y, int64_t stride, bool add, const PairSums& p) {
  const bool reads = add && p.first;
  float* row = y + p.token * stride + p.column;
  const bool streams = !add && p.columns == 2 * kTileRows && (reinterpret_cast<uintptr_t>(row) | stride * 4) % 64 == 0;
  const int lanes[2] = {p.columns < kTileRows ? p.columns : kTileRows, p.columns - kTileRows};
  for (int t = 0; t < p.tokens; ++t, row += stride)
    for (int tile = 0; tile < (lanes[1] > 0 ? 2 : 1); ++tile) {
      float* const to = row + tile * kTileRows;
      const int64_t at = PairSums::place(t, tile);
      Vec sum = CKDIST_VECTORS::load(p.sums + at);
      if (!p.first) sum = CKDIST_VECTORS::load(p.totals + at) + sum;
      else if (reads) sum = load_n(to, lanes[tile]) + sum;
      if (!p.last) store(p.totals + at, sum);
      else if (streams) _mm512_stream_ps(to, sum.v);
      else store_n(to, sum, lanes[tile]);
    }
}

// Up to 32 rows of activations, and the distances in bytes between rows and between steps of 32 columns.
struct StepRows {
  const uint8_t* at;
  int64_t row, step;
  int count;
};

// Multiplies rows by tiles of a matrix of one segment, for small products whose operands are in the caches.
template <bool add>
void multiply_rows(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const StepRows& x, float* y,
                   int64_t y_stride) {
  alignas(64) float sums[kPairSums];
  alignas(64) uint8_t ends[2][kTileBytes], x_ends[kTokensAtOnce][kTileRowBytes];
  const int64_t blocks = (matrix.cols + 15) / 16, whole = blocks / 2;
  const bool half = blocks % 2 != 0;
  if (half) std::memset(ends, 0, sizeof ends), std::memset(x_ends, 0, sizeof x_ends);
  for (int t = 0; t < x.count && half; ++t)
    std::memcpy(x_ends[t], x.at + t * x.row + whole * x.step, kTileRowBytes / 2);
  for (int64_t tile = tile_begin; tile < tile_end; tile += 2) {
    TileStrip strip{x.count, tile_end - tile > 1 ? 2 : 1, 0, y + tile * kTileRows, y_stride};
    strip.rows = static_cast<int>(least(strip.tile_count * kTileRows, matrix.rows - tile * kTileRows));
    const uint8_t *one = matrix.tiles + tile * matrix.tile_bytes,
                  *two = one + (strip.tile_count - 1) * matrix.tile_bytes;
    zero_sums(strip.strips());
    for (int64_t s = 0; s < whole; ++s, one += kTileBytes, two += kTileBytes)
      add_products<false>(strip, x.at + s * x.step, x.row, one, two);
    if (half) {
      std::memcpy(ends[0], one, kTileBytes / 2), std::memcpy(ends[1], two, kTileBytes / 2);
      add_products<false>(strip, x_ends[0], kTileRowBytes, ends[0], ends[1]);
    }
    if (!add && strip.whole()) {
      store_sums(strip);
      continue;
    }
    store_tiles(strip, sums);
    write_sums<add>(strip, sums);
  }
}

void pack_strip_rows(const uint8_t* x, int64_t stride, int64_t rows, int64_t cols, uint8_t* strip) {
  constexpr int64_t at_once = 4;  // steps
  const int64_t steps = (cols + 31) / 32, left = cols - (steps - 1) * 32;
  for (int64_t first = 0; first < steps; first += at_once)
    for (int64_t row = 0; row < kStripRows; ++row)
      for (int64_t s = first; s < least(first + at_once, steps); ++s) {
        const __mmask32 columns = static_cast<__mmask32>(row >= rows ? 0 : s + 1 < steps ? ~0u : ~0u >> (32 - left));
        _mm512_store_si512(strip + s * kStepOfStrip + row * kTileRowBytes,
                           _mm512_maskz_loadu_epi16(columns, x + row * stride + s * kTileRowBytes));
      }
}

// Neighbouring rows of x become pairs of 32 columns, and blocks of 16 x 16 pairs are transposed.
void pack_strip_columns(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, uint8_t* strip) {
  const __mmask32 some = static_cast<__mmask32>(~0u >> (kStripRows - columns));
  for (int64_t row = 0; row < rows; row += 32, strip += kStepOfStrip) {
    Vec low[kLanes], high[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t at = row + 2 * i;
      const __m512i a = _mm512_maskz_loadu_epi16(at < rows ? some : 0, x + at * stride),
                    b = _mm512_maskz_loadu_epi16(at + 1 < rows ? some : 0, x + (at + 1) * stride);
      low[i].v = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
      high[i].v = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
    }
    transpose(low), transpose(high);
    for (int i = 0; i < kLanes; ++i) {
      // Unpacking takes four of each eight columns.
      float* const to = reinterpret_cast<float*>(strip + (i / 4 * 8 + i % 4) * kTileRowBytes);
      store(to, low[i]), store(to + 4 * kLanes, high[i]);
    }
  }
}

// The strip of up to 32 rows that are packed like weights: two tiles, with words (pairs of columns) as [word][16 rows].
void pack_strip_tiles(const uint8_t* tiles, int64_t tile_bytes, int64_t rows, int64_t cols, uint8_t* strip) {
  const int64_t words = (cols + 15) / 16 * 8;
  for (int64_t word = 0; word < words; word += kLanes, strip += kStepOfStrip)
    for (int half = 0; half * kTileRows < rows; ++half) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i)
        block[i].v = word + i < words ? _mm512_loadu_ps(tiles + half * tile_bytes + (word + i) * 4 * kTileRows)
                                      : _mm512_setzero_ps();
      transpose(block);
      for (int i = 0; i < kLanes; ++i)
        store(reinterpret_cast<float*>(strip + half * kTileBytes + i * kTileRowBytes), block[i]);
    }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
