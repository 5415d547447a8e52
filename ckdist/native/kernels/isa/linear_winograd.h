// Products of many tokens with signed codes of 8 bits, without vpdpbusd. With vpmaddubsw, 32 products take three
// instructions for multipliers (signs, products, widening) and an addition. Most CPUs have two multipliers. Winograd's
// inner product ("A new algorithm for inner product", IEEE Transactions on Computers C-17, 1968) takes one, and three
// additions:
//   w0 x0 + w1 x1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1
// The factors have 16 bits. x0 x1 is summed once for all rows, w0 w1 once for all tokens. Integers are exact and floats
// are added in the order of a strip, so a token has the same bits in both. Private to isa/.
#pragma once
#include "kernels/isa/linear_avx2.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kTokensAtOnce = 4;                    // their sums, for a tile, are half of the registers
constexpr int kLeastTokens = 16, kLeastTiles = 2;   // fewer do not repay the expansion of weights, or of tokens
constexpr int kMostTokens = 128, kMostGroups = 32;  // of a panel (288 KB), which stays in the L2 cache for all tiles

// True for the types that are multiplied so.
template <Type type>
constexpr bool in_pairs() {
  return is_signed<type>() && layout_of(type).scales == ScaleKind::half;
}

// Columns 4i and 4i + 2 of each word of four codes as 16-bit numbers; and columns 4i + 1 and 4i + 3.
inline __m256i even_columns(__m256i codes) { return _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8); }
inline __m256i odd_columns(__m256i codes) { return _mm256_srai_epi16(codes, 8); }

// Some tokens' activations of some groups of 32 columns, (groups, tokens).
struct TokenPanel {
  int64_t tokens;                                            // a multiple of kTokensAtOnce
  alignas(64) uint8_t codes[kMostGroups * kMostTokens][64];  // even columns of 8 words, then odd ones
  float scales[kMostGroups * kMostTokens];
  alignas(16) int32_t products[kMostGroups * kMostTokens];  // minus the sum of x0 x1

  // A few tokens at a time, so that their rows are read from beginning to end.
  void fill(const Columns& x, int64_t x_stride, int64_t count, int64_t groups) {
    tokens = (count + kTokensAtOnce - 1) / kTokensAtOnce * kTokensAtOnce;
    for (int64_t t = 0; t < tokens; t += kTokensAtOnce) {
      Columns row[kTokensAtOnce];
      for (int i = 0; i < kTokensAtOnce; ++i) {
        const int64_t offset = (t + i < count ? t + i : count - 1) * x_stride;
        row[i] = {x.codes + offset, x.scales + offset, nullptr, nullptr};
      }
      for (int64_t g = 0, at = t; g < groups; ++g, at += tokens) {
        __m256i pairs[kTokensAtOnce];
#pragma GCC unroll 4
        for (int i = 0; i < kTokensAtOnce; ++i) {
          const __m256i word = load(row[i].codes + g * kGroupColumns);
          const __m256i even = even_columns(word), odd = odd_columns(word);
          _mm256_store_si256(reinterpret_cast<__m256i*>(codes[at + i]), even);
          _mm256_store_si256(reinterpret_cast<__m256i*>(codes[at + i] + 32), odd);
          pairs[i] = _mm256_madd_epi16(even, odd);
          std::memcpy(&scales[at + i], row[i].scales + g * sizeof(float), sizeof(float));
        }
        const __m256i sums =
            _mm256_hadd_epi32(_mm256_hadd_epi32(pairs[0], pairs[1]), _mm256_hadd_epi32(pairs[2], pairs[3]));
        const __m128i whole = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(&products[at]), _mm_sub_epi32(_mm_setzero_si128(), whole));
      }
    }
  }
};

// An integer added to its bits is added to the number, if it is below 2^22. So sums of products begin here, and are
// floats without a conversion.
constexpr float kBase = 3 << 22;

// A tile's weights of 32 columns.
struct WeightGroup {
  __m256i odd[kSteps][kParts], even[kSteps][kParts];
  __m256i products[kParts];            // bits of kBase, minus the sum of w0 w1
  __m256 scale[kParts], base[kParts];  // base: -kBase times the scale, exact for scales of 11 bits

  template <Type type, int step>
  [[gnu::always_inline]] void expand_step(const uint8_t* planes, int half) {
    const __m256i codes = read_step<type, step>(planes);
    even[step][half] = even_columns(codes), odd[step][half] = odd_columns(codes);
    products[half] = _mm256_sub_epi32(products[half], _mm256_madd_epi16(even_columns(codes), odd_columns(codes)));
  }

  template <Type type>
  void expand(const uint8_t* at, int group) {
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      const Block<type> block = {at, h};
      const uint8_t* planes = block.planes(group);
      products[h] = _mm256_castps_si256(_mm256_set1_ps(kBase));
      expand_step<type, 0>(planes, h), expand_step<type, 1>(planes, h);
      expand_step<type, 2>(planes, h), expand_step<type, 3>(planes, h);
      expand_step<type, 4>(planes, h), expand_step<type, 5>(planes, h);
      expand_step<type, 6>(planes, h), expand_step<type, 7>(planes, h);
      scale[h] = _mm256_castsi256_ps(block.scale(group));
      base[h] = _mm256_mul_ps(scale[h], _mm256_set1_ps(-kBase));
    }
  }
};

// Sums of tokens for the rows of a tile: in y, or in a buffer.
struct TokenSums {
  float* at;
  int64_t stride;

  TokenSums from(int64_t token) const { return {at + token * stride, stride}; }
};

// Adds the products of a group with a few tokens of the panel, from number `at` on, to their sums before.
inline void add_tokens(const WeightGroup& weights, const TokenPanel& x, int64_t at, TokenSums before, TokenSums after) {
  __m256i sum[kTokensAtOnce][kParts];
  const uint8_t* const codes = x.codes[at];
#pragma GCC unroll 4
  for (int t = 0; t < kTokensAtOnce; ++t) {
    const __m256i products = _mm256_set1_epi32(x.products[at + t]);
    sum[t][0] = _mm256_add_epi32(weights.products[0], products);
    sum[t][1] = _mm256_add_epi32(weights.products[1], products);
  }
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    const __m256i odd0 = weights.odd[s][0], odd1 = weights.odd[s][1];
    const __m256i even0 = weights.even[s][0], even1 = weights.even[s][1];
    // Written by hand: 8 sums, 4 vectors of weights and 4 intermediate results are all registers.
#pragma GCC unroll 4
    for (int t = 0; t < kTokensAtOnce; ++t) {
      __m256i even, odd, first, second;
      asm("vpbroadcastd %10, %2\n\tvpbroadcastd %11, %3\n\t"
          "vpaddw %6, %2, %4\n\tvpaddw %8, %3, %5\n\tvpaddw %7, %2, %2\n\tvpaddw %9, %3, %3\n\t"
          "vpmaddwd %4, %5, %4\n\tvpmaddwd %2, %3, %2\n\tvpaddd %4, %0, %0\n\tvpaddd %2, %1, %1"
          : "+x"(sum[t][0]), "+x"(sum[t][1]), "=&x"(even), "=&x"(odd), "=&x"(first), "=&x"(second)
          : "x"(odd0), "x"(odd1), "x"(even0), "x"(even1), "m"(CKDIST_WORD(codes + 64 * t + 4 * s)),
            "m"(CKDIST_WORD(codes + 64 * t + 32 + 4 * s)));
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokensAtOnce; ++t) {
    const __m256 scale = _mm256_set1_ps(x.scales[at + t]);
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      const __m256 scaled = _mm256_fmadd_ps(_mm256_castsi256_ps(sum[t][h]), weights.scale[h], weights.base[h]);
      const __m256 total = _mm256_loadu_ps(before.from(t).at + kPartRows * h);
      _mm256_storeu_ps(after.from(t).at + kPartRows * h, _mm256_fmadd_ps(scaled, scale, total));
    }
  }
}

// Multiplies a tile by the tokens of a panel. `blocks`: its columns' packed blocks. `adds`: to the sums in y.
template <Type type>
void multiply_panel(const uint8_t* block, int64_t blocks, const TokenPanel& x, int64_t tokens, int rows, bool adds,
                    float* y, int64_t y_stride) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int groups = layout.columns / kGroupColumns;
  alignas(64) float buffer[kMostTokens][kTileRows], zeros[kTileRows] = {};
  const TokenSums sums = {buffer[0], kTileRows}, none = {zeros, 0}, in_y = {y, y_stride};
  // Their first sums are read from y, and their last ones are written to it while products run: y is far away.
  const int64_t direct = rows == kTileRows && blocks > 0 ? tokens / kTokensAtOnce * kTokensAtOnce : 0;
  for (int64_t t = direct; t < x.tokens; ++t)
    for (int h = 0; h < kParts; ++h)
      _mm256_store_ps(buffer[t] + kPartRows * h,
                      adds && t < tokens ? load_rows(y + t * y_stride, rows, h) : _mm256_setzero_ps());
  WeightGroup weights;
  for (int64_t b = 0; b < blocks; ++b, block += layout.bytes()) {
    fetch_lines(block + layout.bytes(), layout.bytes() / 64);  // the tokens take long enough
    for (int g = 0; g < groups; ++g) {
      weights.template expand<type>(block, g);
      const int64_t at = (b * groups + g) * x.tokens;
      const bool first = b + g == 0, last = b == blocks - 1 && g == groups - 1;
      TokenSums before = !first ? sums : adds ? in_y : none, after = last ? in_y : sums;
      for (int64_t t = 0; t < x.tokens; t += kTokensAtOnce) {
        if (t == direct) before = after = sums.from(t);
        add_tokens(weights, x, at + t, before, after);
        before = before.from(kTokensAtOnce), after = after.from(kTokensAtOnce);
      }
    }
  }
  for (int64_t t = direct; t < tokens; ++t)
    for (int h = 0; h < kParts; ++h) store_rows(y + t * y_stride, rows, h, _mm256_load_ps(buffer[t] + kPartRows * h));
}

template <Type type>
void multiply_in_panels(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
                        int64_t tokens, float* y, int64_t y_stride) {
  if (tokens < kLeastTokens || tile_end - tile_begin < kLeastTiles)
    return multiply<Product<type>>(matrix, tile_begin, tile_end, x, x_stride, tokens, y, y_stride);
  constexpr BlockLayout layout = layout_of(type);
  constexpr int64_t groups = layout.columns / kGroupColumns, most_blocks = kMostGroups / groups;
  const int64_t blocks = (matrix.cols + layout.columns - 1) / layout.columns;
  TokenPanel panel;
  for (int64_t token = 0; token < tokens; token += kMostTokens) {
    const int64_t count = tokens - token < kMostTokens ? tokens - token : kMostTokens;
    Columns columns = Columns::of(x + token * x_stride, matrix.padded(), matrix.first_column);
    int64_t block = 0;
    do {  // once for a matrix without columns, too
      const int64_t some = blocks - block < most_blocks ? blocks - block : most_blocks;
      panel.fill(columns, x_stride, count, some * groups);
      columns.skip(static_cast<int>(some * groups));
      for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
        const int64_t left = matrix.rows - tile * kTileRows;
        multiply_panel<type>(matrix.tiles + tile * matrix.tile_bytes + block * layout.bytes(), some, panel, count,
                             static_cast<int>(left < kTileRows ? left : kTileRows), block > 0,
                             y + token * y_stride + tile * kTileRows, y_stride);
      }
      block += most_blocks;
    } while (block < blocks);
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
