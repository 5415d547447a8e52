// The matrix products of training: all are y[t][row] = dot(matrix row, x[t]) of packed tiles, as in serving.
//   y = x W^T: W is the matrix, the tokens' x are the activations.
//   dx = dy W: W turned is the matrix; of several W over one x, all of them side by side, so that their sum is one
//   product. dW = dy^T x: x turned is the matrix, dy turned the activations; the sum goes over the tokens.
#include <algorithm>

#include "core/futex.h"
#include "train/training.h"

namespace ckdist {

namespace {
int count(const int32_t* operands, int most) {
  int n = 0;
  while (n < most && operands[n] >= 0) ++n;
  return n;
}
int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }
}  // namespace

// Tiles of one item of a product: as many as stay in the L2 cache, as even as can be, in threes, as the kernel takes
// them. Of tiles so long that few of them would, a block of the columns stays, and more tiles share what is read of the
// tokens.
int64_t Training::item_tiles(const Matrix& matrix) const {
  const int64_t all = matrix.tile_count(), fitting = kTileBytes / (matrix.cols * column_bytes());
  int64_t tiles = fitting < 3 ? kMaxTiles : std::min(fitting, kMaxTiles);
  tiles = (all + (all + tiles - 1) / tiles - 1) / ((all + tiles - 1) / tiles);
  return std::min((tiles + 2) / 3 * 3, all);
}

void Training::multiply(int thread, const Product* products, int n) {
  struct Cut {
    int64_t tiles, tile_parts, token_parts;
  } cuts[8];
  int64_t items = 0;
  for (int p = 0; p < n; ++p) {
    Cut& c = cuts[p];
    const int64_t all = products[p].matrix.tile_count();
    c.tiles = item_tiles(products[p].matrix);
    c.tile_parts = (all + c.tiles - 1) / c.tiles, c.token_parts = (products[p].tokens + kTokens - 1) / kTokens;
    items += c.tile_parts * c.token_parts;
  }
  share(items, [&](int64_t item) {
    int p = 0;
    for (; item >= cuts[p].tile_parts * cuts[p].token_parts; ++p) item -= cuts[p].tile_parts * cuts[p].token_parts;
    const Product& product = products[p];
    const Cut& c = cuts[p];
    const int64_t tile = item / c.token_parts * c.tiles, token = item % c.token_parts * kTokens,
                  column = tile * kTileRows;
    const int64_t tiles = std::min(c.tiles, product.matrix.tile_count() - tile),
                  tokens = std::min(kTokens, product.tokens - token);
    const int64_t columns = std::min(tiles * kTileRows, product.matrix.rows - column), first = product.first + token;
    const Operand y = product.to.at ? Operand{product.to.row(token), product.to.stride} : operand(product.out, first);
    ProductOutput out{y.at + column * bytes_of(product.out), y.stride, narrow(product.out)};
    if (product.bias) out.bias = product.bias + column;
    if (product.residual >= 0)
      out.residual = floats(product.residual, first) + column,
      out.residual_stride = values_[product.residual].stride / 4;
    Matrix part = product.matrix;
    part.rows = columns, part.tiles += tile * part.tile_bytes;
    product_.produce(part, product.x.row(token), product.x.stride, tokens, reinterpret_cast<float*>(own(thread)), out);
    const int64_t end = round16(width(product.out)), room = values_[product.out].room;
    if (column + columns == width(product.out) && room > end)
      for (int64_t t = 0; t < tokens; ++t)
        std::fill_n(y.row(t) + end * bytes_of(product.out), (room - end) * bytes_of(product.out), uint8_t{0});
  });
}

// The matrices of a step, in place where they are frozen, else with a place in the step's workspace.
Training::Packs Training::packs_of(const Step& step, Carver& c) const {
  Packs packs{};
  for (int i = 0; i < count(step.pack, 4); ++i) {
    packs.matrix[i] = packed_[step.pack[i]];
    if (!packs.matrix[i].tiles) packs.matrix[i].tiles = c.bytes(bytes_of(packs.matrix[i]));
  }
  return packs;
}

void Training::pack(int thread, const int32_t* packs, const Matrix* matrices, int n) {
  const int64_t start = now_ns();
  int64_t items[5] = {0};
  for (int i = 0; i < n; ++i) items[i + 1] = items[i] + (matrices[i].tile_count() + kPackTiles - 1) / kPackTiles;
  share(items[n], [&](int64_t item) {
    int i = 0;
    while (item >= items[i + 1]) ++i;
    const ckdist_training_pack& p = packs_[packs[i]];
    const Matrix& m = matrices[i];
    const int64_t begin = (item - items[i]) * kPackTiles, end = std::min(begin + kPackTiles, m.tile_count());
    const auto rows = [&](int64_t tile) { return int(std::min<int64_t>(kTileRows, m.rows - tile * kTileRows)); };
    const auto place = [&](int64_t tile) { return const_cast<uint8_t*>(m.tiles) + tile * m.tile_bytes; };
    int64_t column = 0;
    for (int part = 0; part < p.count; ++part) {
      const ckdist_training_parameter& w = parameters_[p.parameter[part]];
      const float* const x = parameter(p.parameter[part]);
      if (!p.turned) {
        for (int64_t tile = begin; tile < end; ++tile)
          packing_.rows(x + tile * kTileRows * w.cols, w.cols, rows(tile), w.cols, place(tile));
        continue;
      }
      for (int64_t row = 0; row < w.rows;
           row += kPackRows)  // a few at a time: the tiles' parts of a row lie side by side
        for (int64_t tile = begin; tile < end; ++tile)
          packing_.columns(x + row * w.cols + tile * kTileRows, w.cols, rows(tile), std::min(kPackRows, w.rows - row),
                           place(tile) + (column + row) * column_bytes());
      column += round16(w.rows);
    }
  });
  if (thread == 0) times_[18] += double(now_ns() - start) * 1e-9;
}

Training::Packs Training::pack(int thread, const Step& step, Carver& c) {
  const Packs packs = packs_of(step, c);
  int32_t fresh[4];
  Matrix matrices[4];
  int n = 0;
  for (int i = 0; i < count(step.pack, 4); ++i)
    if (!packed_[step.pack[i]].tiles) fresh[n] = step.pack[i], matrices[n++] = packs.matrix[i];
  if (n) pack(thread, fresh, matrices, n);
  return packs;
}

void Training::pack_frozen(int thread) {
  for (const int32_t index : frozen_) pack(thread, &index, &packed_[index], 1);
}

void Training::linear(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const Packs packs = pack(thread, step, carver);
  Product products[4];
  const int n = count(step.out, 4);
  for (int m = 0; m < n; ++m)
    products[m] = {packs.matrix[m],
                   operand(step.in[0]),
                   batch_.tokens,
                   step.out[m],
                   step.parameter[m] < 0 ? nullptr : parameter(step.parameter[m]),
                   step.in[1]};
  multiply(thread, products, n);
}

void Training::linear_grad(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const Product product{pack(thread, step, carver).matrix[0], operand(step.in[0]), batch_.tokens, step.out[0]};
  multiply(thread, &product, 1);
}

// x, (tokens, width), turned: rows of a matrix whose columns are the tokens. A few tokens at a time, so that their rows
// stay in the L1 cache from tile to tile.
void Training::turn(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles, int64_t tile_bytes) const {
  for (int64_t first = 0; first < tokens; first += kTurned)
    for (int64_t at = 0; at < width; at += 2 * kTileRows)
      packing_.operand_columns(x.row(first) + at * element_bytes(), x.stride,
                               int(std::min<int64_t>(2 * kTileRows, width - at)),
                               std::min<int64_t>(kTurned, tokens - first),
                               tiles + at / kTileRows * tile_bytes + first * column_bytes(), tile_bytes);
}

// Columns [64 item, ...) of x.
void Training::turn_matrix(const Operand& x, int64_t width, int64_t tokens, int64_t item, uint8_t* tiles) const {
  const int64_t at = item * kColumns;
  turn({x.at + at * element_bytes(), x.stride}, std::min<int64_t>(kColumns, width - at), tokens,
       tiles + at / kTileRows * tile_bytes(tokens), tile_bytes(tokens));
}

// gradient (+)= dy turned times x, of each dy over one x. Who turns a few columns of dy also multiplies them, while
// they are in the L2 cache.
void Training::add_outer(int thread, const Matrix& x, int64_t tokens, const Outer* outers, int n) {
  int64_t items[5] = {0};
  for (int i = 0; i < n; ++i) items[i + 1] = items[i] + (outers[i].width + kOuterRows - 1) / kOuterRows;
  const int64_t parts = std::clamp<int64_t>(8 * pool_.size() / std::max<int64_t>(items[n], 1), 1,
                                            (x.tile_count() + kSumTiles - 1) / kSumTiles);
  share(items[n] * parts, [&](int64_t index) {
    const int64_t item = index / parts, part = index % parts;
    int i = 0;
    while (item >= items[i + 1]) ++i;
    const Outer& outer = outers[i];
    const int64_t at = (item - items[i]) * kOuterRows, rows = std::min(kOuterRows, outer.width - at);
    const int64_t end = x.tile_count() * (part + 1) / parts, turned_bytes = tile_bytes(kOuterColumns);
    for (int64_t first = 0; first < tokens; first += kOuterColumns) {
      Matrix some = x;
      some.cols = std::min(kOuterColumns, tokens - first), some.tiles += first * column_bytes();
      turn({outer.dy.row(first) + at * element_bytes(), outer.dy.stride}, rows, some.cols, own(thread), turned_bytes);
      const int64_t start = x.tile_count() * part / parts,
                    after = first + kOuterColumns < tokens ? first + kOuterColumns : 0;
      for (int64_t tile = start; tile < end; tile += kSumTiles) {
        const uint8_t* const next = tile + kSumTiles < end
                                        ? some.tiles + kSumTiles * x.tile_bytes
                                        : x.tiles + after * column_bytes() - (tile - start) * x.tile_bytes;
        product_.outer(some, tile, std::min(tile + kSumTiles, end), own(thread), turned_bytes, rows,
                       outer.gradient + at * x.rows, x.rows, outer.add || first > 0, next);
      }
    }
  });
}

void Training::linear_weight_grad(int thread, const Step& step) {
  const int64_t cols = width(step.in[0]), tokens = batch_.tokens;
  uint8_t* const turned = workspace_->data();
  share(column_items(cols), [&](int64_t item) { turn_matrix(operand(step.in[0]), cols, tokens, item, turned); });
  Outer outers[4];
  const int n = count(step.in + 1, 4);
  for (int i = 0; i < n; ++i)
    outers[i] = {operand(step.in[i + 1]), width(step.in[i + 1]), gradient(step.gradient[i]), adds(step, i)};
  add_outer(thread, matrix(cols, tokens, turned), tokens, outers, n);
}

int64_t Training::workspace(const Step& step) const {
  const int64_t tokens = program_.max_tokens, chunks = (tokens + kSumRows - 1) / kSumRows;
  Carver c{nullptr};
  switch (step.op) {
    case ckdist_train_linear:
    case ckdist_train_linear_grad: packs_of(step, c); break;
    case ckdist_train_linear_weight_grad: c.bytes(round16(width(step.in[0])) / 16 * tile_bytes(tokens)); break;
    case ckdist_train_rms_norm_grad: c.floats(chunks * step.i[0]); break;
    case ckdist_train_bias_grad:
      for (int m = 0; m < count(step.in, 4); ++m) c.floats(chunks * width(step.in[m]));
      break;
    case ckdist_train_cross_entropy: loss_space(c, step), packs_of(step, c); break;
    default: break;
  }
  return c.used;
}

}  // namespace ckdist
