#include "runtime/steps/products.h"

namespace ckdist {

namespace {
// Bytes of a product's item: fits an L2 cache of 2 MiB. AMX is faster with many tiles.
constexpr int64_t kTileBytes = 1536 << 10;
constexpr int64_t kMaxItemTiles = 32;  // maximum tiles of an item
constexpr int64_t kOuterRows = 128,
                  kSumTiles = 32;                    // of a gradient; both factors stay in the L2 cache
constexpr int64_t kLeastItemTiles = 12, kItems = 4;  // of an item; of a thread in one product
constexpr int64_t kTransposedRows = 64;              // tokens that are transposed at a time
// Columns of a gradient's dy that an item multiplies by all tiles of x, and tokens of a call: their strips and sums fit
// the L2 cache.
constexpr int64_t kStripsOuterRows = 256, kLeastOuterRows = 128, kOuterTokens = 1024;
}  // namespace

// Items are as even as possible, in multiples of three tiles, as kernels take them. If fewer than three tiles fit into
// `bytes`, items have more tiles: the cache holds a block of their columns, and more tiles share the reads of the
// tokens.
int64_t Products::item_tiles(const Training& r, const Matrix& matrix, int64_t bytes) {
  const int64_t all = matrix.tile_count(), fitting = bytes / (matrix.cols * r.column_bytes());
  int64_t tiles = fitting < 3 ? kMaxItemTiles : std::min(fitting, kMaxItemTiles);
  tiles = parts_of(all, parts_of(all, tiles));
  return std::min((tiles + 2) / 3 * 3, all);
}

int64_t Products::thread_bytes(const Training& r) {
  if (r.product.strips) return kStripsSums * 4 + kStripsOuterRows / kStripRows * strip_bytes(kOuterTokens);
  return std::max(kTokens * (kMaxItemTiles + 1) * kTileRows * 4, kOuterRows / kTileRows * r.tile_bytes(kOuterColumns));
}

int64_t Products::strips_bytes(const Training& r, int64_t width, int64_t tokens) {
  return r.product.strips ? parts_of(tokens, kStripRows) * strip_bytes(width) : 0;
}

void Products::pack_strips(const Operand& x, int64_t width, int64_t tokens, uint8_t* strips) {
  r_.parallel_for(thread_, index_, parts_of(tokens, kStripRows), [&](int64_t strip) {
    const int64_t token = strip * kStripRows;
    r_.product.strips->pack_rows(x.row(token), x.stride, std::min(kStripRows, tokens - token), width,
                                 strips + strip * strip_bytes(width));
  });
}

// With strips, a product has few large items, as long as there are enough for all threads.
void Products::divide(const Product* products, int n, Parts* parts) const {
  const bool strips = r_.product.strips != nullptr;
  const int64_t wanted = strips && r_.threads() == 1 ? 1 : kItems * r_.threads();
  for (int p = 0; p < n; ++p) {
    Parts& c = parts[p];
    const int64_t all = products[p].matrix.tile_count();
    c.tokens = strips ? kStripsTokens : kTokens;
    c.tiles = strips ? kStripsTiles : item_tiles(r_, products[p].matrix, kTileBytes);
    c.by_tokens = parts_of(products[p].tokens, c.tokens);
    while (strips && c.tokens > kTokens && c.by_tokens * parts_of(all, c.tiles) * n < wanted)
      c.tokens /= 2, c.by_tokens = parts_of(products[p].tokens, c.tokens);
    const int64_t tiles = (all / std::max<int64_t>(wanted / (n * std::max<int64_t>(c.by_tokens, 1)), 1) + 5) / 6 * 6;
    c.tiles = std::min(c.tiles, std::max(tiles, kLeastItemTiles));
    c.by_tiles = parts_of(all, c.tiles);
  }
}

void Products::multiply(const Product* products, int n) {
  Parts parts[kMost];
  divide(products, n, parts);
  int64_t items = 0;
  for (int p = 0; p < n; ++p) {
    items += parts[p].items();
    if (products[p].strips && (p == 0 || products[p].strips != products[p - 1].strips))
      pack_strips(products[p].x, products[p].matrix.cols, products[p].tokens, products[p].strips);
  }
  r_.parallel_for(thread_, index_, items, [&](int64_t item) {
    int p = 0;
    for (; item >= parts[p].items(); ++p) item -= parts[p].items();
    produce(products[p], parts[p], item);
  });
}

void Products::produce(const Product& product, const Parts& c, int64_t item) {
  // With strips, consecutive items have the same tokens, else the same tiles.
  const bool strips = product.strips != nullptr;
  const int64_t tile = (strips ? item % c.by_tiles : item / c.by_tokens) * c.tiles,
                token = (strips ? item / c.by_tiles : item % c.by_tokens) * c.tokens, column = tile * kTileRows;
  const int64_t tiles = std::min(c.tiles, product.matrix.tile_count() - tile),
                tokens = std::min(c.tokens, product.tokens - token);
  const int64_t columns = std::min(tiles * kTileRows, product.matrix.rows - column), first = product.first + token;
  const Operand y = product.to.at ? Operand{product.to.row(token), product.to.stride} : r_.operand(product.out, first);
  ProductOutput out{y.at + column * r_.bytes_of(product.out), y.stride, r_.narrow(product.out)};
  if (product.bias) out.bias = product.bias + column;
  if (product.residual >= 0)
    out.residual = r_.floats(product.residual, first) + column,
    out.residual_stride = r_.value(product.residual).stride / 4;
  Matrix part = product.matrix;
  part.rows = columns, part.tiles += tile * part.tile_bytes;
  float* const sums = reinterpret_cast<float*>(r_.memory(thread_));
  if (strips) {
    const bool last = tile + tiles == product.matrix.tile_count();
    r_.product.strips->produce(part, product.strips + token / kStripRows * strip_bytes(part.cols), tokens,
                               last ? product.matrix.tiles : part.tiles + tiles * part.tile_bytes, sums, out);
  } else {
    r_.product.produce(part, product.x.row(token), product.x.stride, tokens, sums, out);
  }
  const int64_t end = round16(r_.width(product.out)), room = r_.value(product.out).room;
  if (column + columns == r_.width(product.out) && room > end)
    for (int64_t t = 0; t < tokens; ++t)
      std::fill_n(y.row(t) + end * r_.bytes_of(product.out), (room - end) * r_.bytes_of(product.out), uint8_t{0});
}

// Packs x, (tokens, width), transposed: (width, tokens). A few tokens at a time, so that their rows stay in the L1
// cache from one tile to the next.
void Products::transpose(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles, int64_t tile_bytes) const {
  for (int64_t first = 0; first < tokens; first += kTransposedRows)
    r_.pack_columns({x.row(first), x.stride}, std::min<int64_t>(kTransposedRows, tokens - first), width,
                    tiles + first * r_.column_bytes(), tile_bytes);
}

void Products::transpose_all(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles) {
  const int64_t tile_bytes = r_.tile_bytes(tokens);
  r_.parallel_for(thread_, index_, parts_of(width, Training::kColumns), [&](int64_t item) {
    const int64_t at = item * Training::kColumns;
    transpose({x.at + at * r_.element_bytes(), x.stride}, std::min<int64_t>(Training::kColumns, width - at), tokens,
              tiles + at / kTileRows * tile_bytes, tile_bytes);
  });
}

// gradient (+)= dy^T x for each dy over one x. A thread transposes a few columns of dy and multiplies them while they
// are in the L2 cache.
void Products::add_outer(const Matrix& x, int64_t tokens, const Outer* outers, int n) {
  if (r_.product.strips) return add_outer_strips(x, tokens, outers, n);
  int64_t items[kMost + 1] = {0};
  for (int i = 0; i < n; ++i) items[i + 1] = items[i] + parts_of(outers[i].width, kOuterRows);
  const int64_t parts = std::clamp<int64_t>(8 * r_.threads() / std::max<int64_t>(items[n], 1), 1,
                                            parts_of(x.tile_count(), kLeastItemTiles));
  const auto boundary = [&](int64_t part) {  // kernels take pairs of tiles
    return part == parts ? x.tile_count() : x.tile_count() * part / parts / 2 * 2;
  };
  int64_t transposed = -1;  // the item whose columns of dy this thread has transposed; consecutive parts share them
  r_.parallel_for(thread_, index_, items[n] * parts, [&](int64_t index) {
    const int64_t item = index / parts, part = index % parts;
    int i = 0;
    while (item >= items[i + 1]) ++i;
    outer_item(x, tokens, outers[i], (item - items[i]) * kOuterRows, boundary(part), boundary(part + 1),
               item == transposed);
    transposed = tokens > kOuterColumns ? -1 : item;
  });
}

// Multiplies kOuterRows columns of dy, from column `at` on, by tiles [begin, end) of x. `transposed`: the thread's
// memory has these columns already.
void Products::outer_item(const Matrix& x, int64_t tokens, const Outer& outer, int64_t at, int64_t begin, int64_t end,
                          bool transposed) {
  const int64_t rows = std::min(kOuterRows, outer.width - at), dy_bytes = r_.tile_bytes(kOuterColumns);
  uint8_t* const dy = r_.memory(thread_);
  for (int64_t first = 0; first < tokens; first += kOuterColumns) {
    Matrix some = x;
    some.cols = std::min(kOuterColumns, tokens - first), some.tiles += first * r_.column_bytes();
    if (!transposed)
      transpose({outer.dy.row(first) + at * r_.element_bytes(), outer.dy.stride}, rows, some.cols, dy, dy_bytes);
    const int64_t after = first + kOuterColumns < tokens ? first + kOuterColumns : 0;
    for (int64_t tile = begin; tile < end; tile += kSumTiles) {
      const uint8_t* const next = tile + kSumTiles < end
                                      ? some.tiles + kSumTiles * x.tile_bytes
                                      : x.tiles + after * r_.column_bytes() - (tile - begin) * x.tile_bytes;
      r_.product.outer(some, tile, std::min(tile + kSumTiles, end), dy, dy_bytes, rows, outer.gradient + at * x.rows,
                       x.rows, outer.add || first > 0, next);
    }
  }
}

void Products::add_outer_strips(const Matrix& x, int64_t tokens, const Outer* outers, int n) {
  const int64_t wanted = r_.threads() == 1 ? 1 : kItems * r_.threads(), groups = parts_of(x.tile_count(), kStripsTiles);
  int64_t rows = kStripsOuterRows, items[kMost + 1] = {0};
  const auto count = [&] {
    for (int i = 0; i < n; ++i) items[i + 1] = items[i] + parts_of(outers[i].width, rows);
    return items[n];
  };
  while (count() < wanted && rows > kLeastOuterRows) rows /= 2;
  const int64_t parts = std::clamp<int64_t>(wanted / items[n], 1, groups);
  r_.parallel_for(thread_, index_, items[n] * parts, [&](int64_t index) {
    const int64_t item = index / parts, part = index % parts;
    int i = 0;
    while (item >= items[i + 1]) ++i;
    outer_strips(x, tokens, outers[i], (item - items[i]) * rows, rows, groups * part / parts,
                 groups * (part + 1) / parts);
  });
}

// Multiplies columns [at, at + rows) of dy by groups [begin, end) of the tiles of x.
void Products::outer_strips(const Matrix& x, int64_t tokens, const Outer& outer, int64_t at, int64_t rows,
                            int64_t begin, int64_t end) {
  const StripKernel& kernel = *r_.product.strips;
  float* const sums = reinterpret_cast<float*>(r_.memory(thread_));
  uint8_t* const strips = r_.memory(thread_) + kStripsSums * 4;
  rows = std::min(rows, outer.width - at);
  for (int64_t first = 0; first < tokens; first += kOuterTokens) {
    const int64_t some = std::min(kOuterTokens, tokens - first);
    for (int64_t token = 0; token < some; token += kStripRows)
      for (int64_t row = 0; row < rows; row += kStripRows)
        kernel.pack_columns(outer.dy.row(first + token) + (at + row) * r_.element_bytes(), outer.dy.stride,
                            std::min(kStripRows, some - token), std::min(kStripRows, rows - row),
                            strips + row / kStripRows * strip_bytes(some) + token / kStripRows * strip_bytes(32));
    for (int64_t group = begin; group < end; ++group) {
      const int64_t column = group * kStripsTiles * kTileRows;
      Matrix part = x;
      part.rows = std::min(kStripsTiles * kTileRows, x.rows - column), part.cols = some;
      part.tiles += group * kStripsTiles * x.tile_bytes + first * r_.column_bytes();
      const uint8_t* const next = group + 1 < end ? part.tiles + kStripsTiles * x.tile_bytes : nullptr;
      kernel.outer(part, strips, rows, next, sums, outer.gradient + at * x.rows + column, x.rows,
                   outer.add || first > 0);
    }
  }
}

}  // namespace ckdist
