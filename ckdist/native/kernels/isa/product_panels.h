// Products of training as panels of AVX-512 or AVX2. Private to isa/.
#pragma once
#include "kernels/isa/product_output.h"

#if defined(__AVX512F__)
#include "kernels/isa/panel_avx512.h"
#else
#include "kernels/isa/panel_avx2.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Words of a block of columns: the tokens of a panel stay in the L1 cache.
constexpr int64_t kBlockColumns = 256;
constexpr int64_t kWideRow = kBlockColumns + 16;  // floats from a widened row to the next

// Memory of later panels, which is prefetched to the L2 cache one line per step: more at a time would have to wait.
struct Ahead {
  const uint8_t* at;
  [[gnu::always_inline]] void step() { __builtin_prefetch(at, 0, 2), at += 64; }
};

// Prefetch of the rows of the tokens after those of a panel, if rows are consecutive: of `rows` rows, the part of the
// panel that begins with `tile`. `none`: memory that the panel reads anyway.
CKDIST_INLINE Ahead next_rows(const uint8_t* rows, int64_t x_stride, int64_t row_bytes, int64_t tile, int64_t words,
                              const uint8_t* none) {
  const int64_t begin = tile / kPanelTiles * 64 * words;
  return {x_stride < 2 * row_bytes && begin < kPanelTokens * x_stride ? rows + begin : none};
}

// Handles the sums of a panel. `tile` counts from the panel's first; it has `rows` rows.
struct Sum {
  float* y;
  int64_t y_stride;
  bool add;
  Ahead next;
  [[gnu::always_inline]] void ahead() { next.step(); }
  [[gnu::always_inline]] void fetch(int64_t token, int64_t tile) const {
    __builtin_prefetch(y + token * y_stride + tile * kTileRows, 1);
  }
  [[gnu::always_inline]] void take(int64_t token, int64_t tile, int rows, Vec sum) const {
    float* const at = y + token * y_stride + tile * kTileRows;
    store_n(at, add ? sum + load_n(at, rows) : sum, rows);
  }
};
struct Finish {
  const ProductOutput& out;
  int64_t first_token, first_column;
  const float* sums;  // sums of the blocks before, or null
  int64_t sums_stride;
  Ahead next;
  [[gnu::always_inline]] void ahead() { next.step(); }
  [[gnu::always_inline]] void fetch(int64_t token, int64_t tile) const {
    const int64_t column = first_column + tile * kTileRows;
    __builtin_prefetch(out.at + (first_token + token) * out.stride + column * (out.narrow ? 2 : 4), 1);
    if (out.residual) __builtin_prefetch(out.residual + (first_token + token) * out.residual_stride + column);
  }
  [[gnu::always_inline]] void take(int64_t token, int64_t tile, int rows, Vec sum) const {
    const Vec whole = sums ? sum + load(sums + token * sums_stride + tile * kTileRows) : sum;
    finish(out, first_token + token, first_column + tile * kTileRows, rows, whole);
  }
};

template <class End>
using Panel = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t, int, const End&);

template <Type type, int tiles, int step, class End>
constexpr Panel<End> kPanelOf[4] = {
    panel<type, tiles, kPanelSizes[0], step, End>, panel<type, tiles, kPanelSizes[1], step, End>,
    panel<type, tiles, kPanelSizes[2], step, End>, panel<type, tiles, kPanelSizes[3], step, End>};

// `tiles` is 1 to kPanelTiles; `size` is an index into kPanelSizes.
template <Form form, int step, class End>
CKDIST_INLINE Panel<End> panel_of(int64_t tiles, int size) {
#if defined(__AVX512F__)
  if (tiles == 3) return kPanelOf<kTiles<form>, 3, step, End>[size];
  if (tiles == 2) return kPanelOf<kTiles<form>, 2, step, End>[size];
#endif
  (void)tiles;
  return kPanelOf<kTiles<form>, 1, step, End>[size];
}

// Calls body(token, index of kPanelSizes, ...) for groups of tokens, which do not cross multiples of `within`; in each
// for groups of tiles with (tile, count, rows of the last).
template <class Body>
CKDIST_INLINE void each_panel(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, int64_t tokens,
                              int64_t within, Body&& body) {
  for (int64_t token = 0; token < tokens;) {
    const int64_t left = least(tokens - token, within - token % within);
    int size = 3;
    while (kPanelSizes[size] > left) --size;
    for (int64_t tile = tile_begin; tile < tile_end;) {
      const int64_t some =
          kPanelTiles == 3 && tile_end - tile == 4 ? 2 : least(kPanelTiles, tile_end - tile);  // four are two and two
      body(token, size, tile, some, static_cast<int>(least(kTileRows, matrix.rows - (tile + some - 1) * kTileRows)));
      tile += some;
    }
    token += kPanelSizes[size];
  }
}

// Calls body(first word, words) for blocks of a matrix's columns, as even as possible.
template <Form form, class Body>
CKDIST_INLINE void each_block(const Matrix& matrix, Body&& body) {
  const int64_t words = words_of<form>(matrix.cols), blocks = (words + kBlockColumns - 1) / kBlockColumns;
  int64_t block = blocks ? (words + blocks - 1) / blocks : 0;
  if (form == Form::widened) block = (block + 15) / 16 * 16;  // rows are widened by whole vectors
  for (int64_t word = 0; word < words; word += block) body(word, least(block, words - word));
}

// The words of a panel's tokens, from the first token on, in the form that is multiplied.
struct PanelRows {
  const uint8_t* at;
  int64_t stride;
};

// Returns the same for each group of tokens in turn. `wide`: buffer for widened bfloat16.
template <Form form>
CKDIST_INLINE PanelRows panel_rows(const uint8_t* x, int64_t x_stride, int64_t word, int64_t words, int size,
                                   bool first, float* wide) {
  x += kFormBytes<form> * word;
  if constexpr (form != Form::widened) return {x, x_stride};
  if (first) widen_rows(x, x_stride, kPanelSizes[size], words, wide, kWideRow);
  return {reinterpret_cast<const uint8_t*>(wide), 4 * kWideRow};
}

template <Form form>
void multiply(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x, int64_t x_stride,
              int64_t tokens, float* y, int64_t y_stride, bool add) {
  const int64_t all = words_of<form>(matrix.cols);
  alignas(64) float wide[form == Form::widened ? kPanelTokens * kWideRow : 1];
  each_block<form>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, tile_begin, tile_end, tokens, tokens,
               [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
                 const uint8_t *const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word, *const row =
                                                                                                      x +
                                                                                                      token * x_stride;
                 const PanelRows rows = panel_rows<form>(row, x_stride, word, words, size, tile == tile_begin, wide);
                 const Ahead next = next_rows(row + kPanelTokens * x_stride, x_stride,
                                              word ? 0 : kFormBytes<form> * all, tile - tile_begin, words, from);
                 panel_of<form, 4, Sum>(some, size)(
                     from, matrix.tile_bytes, rows.at, rows.stride, words, last,
                     Sum{y + token * y_stride + tile * kTileRows, y_stride, add || word > 0, next});
               });
  });
}

template <Form form>
void produce(const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t tokens, float* sums,
             const ProductOutput& out) {
  const int64_t tiles = matrix.tile_count(), all = words_of<form>(matrix.cols);
  // Not a multiple of 4096 bytes, or loads would wait for stores.
  const int64_t stride = (tiles + 1) * kTileRows;
  alignas(64) float wide[form == Form::widened ? kPanelTokens * kWideRow : 1];
  each_block<form>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, 0, tiles, tokens, tokens, [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
      const uint8_t *const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word, *const row =
                                                                                           x + token * x_stride;
      const PanelRows rows = panel_rows<form>(row, x_stride, word, words, size, tile == 0, wide);
      const Ahead next = next_rows(row + kPanelTokens * x_stride + kFormBytes<form> * word, x_stride,
                                   word ? 0 : kFormBytes<form> * all, tile, words, from);
      float* const at = sums + token * stride + tile * kTileRows;
      if (word + words < all)
        panel_of<form, 4, Sum>(some, size)(from, matrix.tile_bytes, rows.at, rows.stride, words, kTileRows,
                                           Sum{at, stride, word > 0, next});
      else
        panel_of<form, 4, Finish>(some, size)(from, matrix.tile_bytes, rows.at, rows.stride, words, last,
                                              Finish{out, token, tile * kTileRows, word ? at : nullptr, stride, next});
    });
  });
}

template <Form form>
void outer(const Matrix& matrix, int64_t tile_begin, int64_t tile_end, const uint8_t* x_tiles, int64_t x_tile_bytes,
           int64_t tokens, float* y, int64_t y_stride, bool add, const uint8_t* next) {
  each_block<form>(matrix, [&](int64_t word, int64_t words) {
    each_panel(matrix, tile_begin, tile_end, tokens, kTileRows,
               [&](int64_t token, int size, int64_t tile, int64_t some, int last) {
                 const uint8_t* const from = matrix.tiles + tile * matrix.tile_bytes + 64 * word;
                 // The first panels of a group of tiles prefetch one tile each.
                 const int64_t turn = token / kPanelTokens;
                 panel_of<form, 64, Sum>(some, size)(
                     from, matrix.tile_bytes,
                     x_tiles + token / kTileRows * x_tile_bytes + token % kTileRows * 4 + 64 * word, 4, words, last,
                     Sum{y + token * y_stride + tile * kTileRows,
                         y_stride,
                         add || word > 0,
                         {next && turn < some ? next + (tile + turn) * matrix.tile_bytes + 64 * word : from}});
               });
  });
}

template <Form form>
constexpr ProductKernel product_kernel() {
  return {kTiles<form>, multiply<form>, produce<form>, outer<form>};
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
