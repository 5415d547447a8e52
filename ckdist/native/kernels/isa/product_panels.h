// Products of training as panels of AVX-512. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"

#include "kernels/isa/panel_avx512.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

template <bool bf16>
constexpr Type kType = bf16 ? Type::bf16 : Type::f32;
constexpr int64_t kBlockWords = 256;  // columns of a block, in words of 4 bytes: eight tokens of it stay in the L1 cache

// What panels to come will read comes to the L2 cache a line a step: more at a time would have to wait.
struct Ahead {
  const uint8_t* at;
  [[gnu::always_inline]] void step() { __builtin_prefetch(at, 0, 2), at += 64; }
};

// The rows of the tokens behind those of a panel, where rows lie one behind the other: of `rows`, the part that falls to the panel that begins with
// `tile`; `none` is what the panel reads anyway.
CKDIST_INLINE Ahead next_rows(const uint8_t* rows, int64_t x_stride, int64_t row_words, int64_t tile, int64_t words, const uint8_t* none) {
  const int64_t begin = tile / kPanelTiles * 64 * words;
  return {x_stride < 8 * row_words && begin < kPanelTokens * x_stride ? rows + begin : none};
}

// What becomes of the sums of a panel. `tile` counts from the panel's first; `rows` of it exist.
struct Sum {
  float* y;
  int64_t y_stride;
  bool add;
  Ahead next;
  [[gnu::always_inline]] void ahead() { next.step(); }
  [[gnu::always_inline]] void fetch(int64_t token, int64_t tile) const { __builtin_prefetch(y + token * y_stride + tile * kTileRows, 1); }
  [[gnu::always_inline]] void take(int64_t token, int64_t tile, int rows, __m512 sum) const {
    float* const at = y + token * y_stride + tile * kTileRows;
    store_n(at, add ? Vec{sum} + load_n(at, rows) : Vec{sum}, rows);
  }
};
struct Finish {
  const ProductOutput& out;
  int64_t first_token, first_column;
  const float* sums;  // of the blocks before, or null
  int64_t sums_stride;
  Ahead next;
  [[gnu::always_inline]] void ahead() { next.step(); }
  [[gnu::always_inline]] void fetch(int64_t token, int64_t tile) const {
    const int64_t column = first_column + tile * kTileRows;
    __builtin_prefetch(out.at + (first_token + token) * out.stride + column * (out.narrow ? 2 : 4), 1);
    if (out.residual) __builtin_prefetch(out.residual + (first_token + token) * out.residual_stride + column);
  }
  [[gnu::always_inline]] void take(int64_t token, int64_t tile, int rows, __m512 sum) const {
    const Vec whole = sums ? Vec{sum} + load(sums + token * sums_stride + tile * kTileRows) : Vec{sum};
    finish(out, first_token + token, first_column + tile * kTileRows, rows, whole);
  }
};

template <class End>
using Panel = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t, int, const End&);

template <Type type, int step, class End>
constexpr Panel<End> kPanels[kPanelTiles][4] = {
    {panel<type, 1, 1, step, End>, panel<type, 1, 2, step, End>, panel<type, 1, 4, step, End>, panel<type, 1, 8, step, End>},
    {panel<type, 2, 1, step, End>, panel<type, 2, 2, step, End>, panel<type, 2, 4, step, End>, panel<type, 2, 8, step, End>},
    {panel<type, 3, 1, step, End>, panel<type, 3, 2, step, End>, panel<type, 3, 4, step, End>, panel<type, 3, 8, step, End>}};

// Calls body(token, 1 << size) for groups of tokens, each with body(tile, count, rows of the last) for groups of tiles.
template <class Body>
CKDIST_INLINE void each_panel(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, int64_t tokens, Body&& body) {
  for (int64_t token = 0; token < tokens;) {
    const int64_t left = tokens - token;
    const int size = left >= kPanelTokens ? 3 : left >= 4 ? 2 : left >= 2 ? 1 : 0;
    for (int64_t tile = tile_begin; tile < tile_end;) {
      const int64_t some = tile_end - tile == kPanelTiles + 1 ? 2 : least(kPanelTiles, tile_end - tile);  // four are two and two
      body(token, size, tile, some, static_cast<int>(least(kTileRows, matrix.rows - (tile + some - 1) * kTileRows)));
      tile += some;
    }
    token += 1 << size;
  }
}

// Calls body(first word, words) for blocks of a matrix's columns, as even as can be.
template <bool bf16, class Body>
CKDIST_INLINE void each_block(const Matrix& matrix, Body&& body) {
  const int64_t words = (matrix.cols + 15) / 16 * 16 / (bf16 ? 2 : 1), blocks = (words + kBlockWords - 1) / kBlockWords;
  const int64_t block = blocks ? (words + blocks - 1) / blocks : 0;
  for (int64_t word = 0; word < words; word += block) body(word, least(block, words - word));
}

template <bool bf16>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride, int64_t tokens, float* y, int64_t y_stride,
              bool add) {
  const int64_t all = (matrix.cols + 15) / 16 * 16 / (bf16 ? 2 : 1);
  each_block<bf16>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, tile_begin, tile_end, tokens, [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
      const uint8_t *const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word, *const row = x + token * x_stride;
      const Ahead next = next_rows(row + kPanelTokens * x_stride, x_stride, word ? 0 : all, tile - tile_begin, words, from);
      kPanels<kType<bf16>, 4, Sum>[some - 1][size](from, matrix.tile_bytes, row + 4 * word, x_stride, words, last,
                                                   Sum{y + token * y_stride + tile * kTileRows, y_stride, add || word > 0, next});
    });
  });
}

template <bool bf16>
void produce(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums, const ProductOutput& out) {
  const int64_t tiles = matrix.tile_count(), all = (matrix.cols + 15) / 16 * 16 / (bf16 ? 2 : 1);
  const int64_t stride = (tiles + 1) * kTileRows;  // no multiple of 4096 bytes: loads would wait for stores
  each_block<bf16>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, 0, tiles, tokens, [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
      const uint8_t *const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word, *const row = x + token * x_stride + 4 * word;
      const Ahead next = next_rows(row + kPanelTokens * x_stride, x_stride, word ? 0 : all, tile, words, from);
      float* const at = sums + token * stride + tile * kTileRows;
      if (word + words < all)
        kPanels<kType<bf16>, 4, Sum>[some - 1][size](from, matrix.tile_bytes, row, x_stride, words, kTileRows, Sum{at, stride, word > 0, next});
      else
        kPanels<kType<bf16>, 4, Finish>[some - 1][size](from, matrix.tile_bytes, row, x_stride, words, last,
                                                 Finish{out, token, tile * kTileRows, word ? at : nullptr, stride, next});
    });
  });
}

template <bool bf16>
void outer(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles, int64_t x_tile_bytes, int64_t tokens, float* y,
           int64_t y_stride, bool add, const uint8_t* next) {
  each_block<bf16>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, tile_begin, tile_end, tokens, [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
      const uint8_t* const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word;
      const int64_t turn = token / kPanelTokens;  // the first panels of a group of tiles fetch a tile each
      kPanels<kType<bf16>, 64, Sum>[some - 1][size](from, matrix.tile_bytes, x_tiles + token / kTileRows * x_tile_bytes + token % kTileRows * 4 + 64 * word, 4,
                                                    words, last, Sum{y + token * y_stride + tile * kTileRows, y_stride, add || word > 0,
                                                                     {next && turn < some ? next + (tile + turn) * matrix.tile_bytes + 64 * word : from}});
    });
  });
}

template <bool bf16>
constexpr ProductKernel product_kernel() {
  return {multiply<bf16>, produce<bf16>, outer<bf16>};
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
