// Products of training. With AVX-512 three tiles meet eight tokens in registers: 24 sums for 11 loads a step, where a strip of one tile (as
// inference has it) needs 17 loads for 16. Elsewhere the products are those of inference, in blocks that are added.
#include "kernels/product.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {

extern const LinearKernel linear_kernels[kTypeCount];

namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

constexpr int kPanelTiles = 3, kPanelTokens = 8;
constexpr int64_t kBlockWords = 256;  // columns of a block, in words of 4 bytes: eight tokens of it stay in the L1 cache

template <bool bf16>
CKDIST_INLINE __m512 multiply_add(__m512 sum, __m512i weights, __m512i x) {
  if constexpr (bf16) return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x));
  return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sum);
}

// `words` steps of `tiles` tiles against `tokens` tokens; `last` are the rows of the last tile that exist.
template <bool bf16, int tiles, int tokens>
void panel(const uint8_t* tile, int64_t tile_bytes, const uint8_t* x, int64_t x_stride, int64_t words, float* y, int64_t y_stride, __mmask16 last, bool add) {
  __m512 sums[tokens][tiles];
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) {
      sums[t][i] = _mm512_setzero_ps();
      __builtin_prefetch(y + t * y_stride + i * kTileRows, 1);
    }
  for (const uint8_t* const end = tile + 64 * words; tile < end; tile += 64, x += 4) {
    __m512i weights[tiles];
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) weights[i] = _mm512_loadu_si512(tile + i * tile_bytes);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      int32_t word;
      std::memcpy(&word, x + t * x_stride, sizeof word);
#pragma GCC unroll 3
      for (int i = 0; i < tiles; ++i) sums[t][i] = multiply_add<bf16>(sums[t][i], weights[i], _mm512_set1_epi32(word));
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 3
    for (int i = 0; i < tiles; ++i) {
      float* const at = y + t * y_stride + i * kTileRows;
      const __mmask16 rows = i == tiles - 1 ? last : static_cast<__mmask16>(0xffff);
      _mm512_mask_storeu_ps(at, rows, add ? _mm512_add_ps(sums[t][i], _mm512_maskz_loadu_ps(rows, at)) : sums[t][i]);
    }
}

using Panel = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t, __mmask16, bool);

template <bool bf16>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
              bool add) {
  static constexpr Panel panels[kPanelTiles][4] = {{panel<bf16, 1, 1>, panel<bf16, 1, 2>, panel<bf16, 1, 4>, panel<bf16, 1, 8>},
                                                   {panel<bf16, 2, 1>, panel<bf16, 2, 2>, panel<bf16, 2, 4>, panel<bf16, 2, 8>},
                                                   {panel<bf16, 3, 1>, panel<bf16, 3, 2>, panel<bf16, 3, 4>, panel<bf16, 3, 8>}};
  const int64_t words = (matrix.cols + 15) / 16 * 16 / (bf16 ? 2 : 1), blocks = (words + kBlockWords - 1) / kBlockWords;
  const int64_t block = blocks ? (words + blocks - 1) / blocks : 0;
  for (int64_t word = 0; word < words; word += block)
    for (int64_t token = 0; token < tokens;) {
      const int64_t left = tokens - token;
      const int size = left >= kPanelTokens ? 3 : left >= 4 ? 2 : left >= 2 ? 1 : 0;
      for (int64_t tile = tile_begin; tile < tile_end;) {
        const int64_t some = tile_end - tile == kPanelTiles + 1 ? 2 : least(kPanelTiles, tile_end - tile);  // four are two and two
        const int64_t rows = least(kTileRows, matrix.rows - (tile + some - 1) * kTileRows);
        panels[some - 1][size](matrix.tiles + tile * matrix.tile_bytes + 64 * word, matrix.tile_bytes, x + token * x_stride + 4 * word, x_stride,
                               least(block, words - word), y + token * y_stride + tile * kTileRows, y_stride, static_cast<__mmask16>((1u << rows) - 1),
                               add || word > 0);
        tile += some;
      }
      token += 1 << size;
    }
}

#else

constexpr int64_t kBlockColumns = 2048, kTokensAtOnce = 32, kTilesAtOnce = 4;

template <bool bf16>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
              bool add) {
  const LinearKernel& kernel = linear_kernels[static_cast<int>(bf16 ? Type::bf16 : Type::f32)];
  constexpr int64_t element = bf16 ? 2 : 4, row = kTilesAtOnce * kTileRows;
  for (int64_t column = 0; column < matrix.cols; column += kBlockColumns) {
    Matrix part = matrix;
    part.cols = least(kBlockColumns, matrix.cols - column), part.tiles += column * element * kTileRows;
    if (!add && column == 0) {
      kernel.multiply(part, tile_begin, tile_end, x, x_stride, tokens, y, y_stride);
      continue;
    }
    alignas(64) float sums[kTokensAtOnce * row];
    for (int64_t tile = tile_begin; tile < tile_end; tile += kTilesAtOnce) {
      Matrix some = part;
      some.rows = least(row, matrix.rows - tile * kTileRows), some.tiles += tile * matrix.tile_bytes;
      for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        const int64_t n = least(kTokensAtOnce, tokens - token);
        kernel.multiply(some, 0, least(kTilesAtOnce, tile_end - tile), x + token * x_stride + column * element, x_stride, n, sums, row);
        for (int64_t t = 0; t < n; ++t)
          for (int64_t r = 0; r < some.rows; ++r) y[(token + t) * y_stride + tile * kTileRows + r] += sums[t * row + r];
      }
    }
  }
}

#endif

}  // namespace

extern const ProductKernels product_kernels = {multiply<false>, multiply<true>};

}  // namespace CKDIST_ISA
}  // namespace ckdist
