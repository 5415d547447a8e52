// The matrix products of training: all are y[t][row] = dot(matrix row, x[t]) of packed tiles, as in serving.
//   y = x W^T: W is the matrix, the tokens' x are the activations.
//   dx = dy W: W turned is the matrix; of several W over one x, all of them side by side, so that their sum is one product.
//   dW = dy^T x: x turned is the matrix, dy turned the activations; the sum goes over the tokens.
#include <algorithm>

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

void Training::multiply(int thread, const Product* products, int n) {
  struct Cut { int64_t tiles, tile_parts, token_parts; } cuts[8];
  int64_t items = 0;
  for (int p = 0; p < n; ++p) {
    Cut& c = cuts[p];
    const int64_t all = products[p].matrix.tile_count();
    c.tiles = std::clamp<int64_t>(kTileBytes / (products[p].matrix.cols * column_bytes()), 3, kMaxTiles);
    c.tiles = (all + (all + c.tiles - 1) / c.tiles - 1) / ((all + c.tiles - 1) / c.tiles);  // as even as can be,
    c.tiles = std::min((c.tiles + 2) / 3 * 3, all);                                         // in threes, as the kernel takes them
    c.tile_parts = (all + c.tiles - 1) / c.tiles, c.token_parts = (products[p].tokens + kTokens - 1) / kTokens;
    items += c.tile_parts * c.token_parts;
  }
  share(items, [&](int64_t item) {
    int p = 0;
    for (; item >= cuts[p].tile_parts * cuts[p].token_parts; ++p) item -= cuts[p].tile_parts * cuts[p].token_parts;
    const Product& product = products[p];
    const Cut& c = cuts[p];
    const int64_t tile = item / c.token_parts * c.tiles, token = item % c.token_parts * kTokens, column = tile * kTileRows;
    const int64_t tiles = std::min(c.tiles, product.matrix.tile_count() - tile), tokens = std::min(kTokens, product.tokens - token);
    const int64_t columns = std::min(tiles * kTileRows, product.matrix.rows - column), first = product.first + token;
    const bool direct = !narrow(product.out);
    float* const y = direct ? floats(product.out, first) + column : reinterpret_cast<float*>(own(thread));  // (tokens, columns)
    const int64_t y_stride = direct ? values_[product.out].stride / 4 : (tiles + 1) * kTileRows;
    Matrix part = product.matrix;
    part.rows = columns, part.tiles += tile * part.tile_bytes;
    product_(part, 0, tiles, product.x.row(token), product.x.stride, tokens, y, y_stride, false);
    for (int64_t t = 0; t < tokens; ++t) {
      float* const row = y + t * y_stride;
      if (product.bias) kernels_.elementwise.add(product.bias + column, columns, row);
      if (product.residual >= 0) kernels_.elementwise.add(floats(product.residual, first + t) + column, columns, row);
      store(product.out, first + t, column, row, columns);
    }
  });
}

void Training::pack(int) {
  constexpr int64_t kBlock = 8;  // tiles of an item
  for (const size_t index : pack_order_) {
    const ckdist_training_pack& p = packs_[index];
    const auto changes = [&](int32_t w) { return parameters_[w].offset < program_.trained_floats; };
    if (packed_once_ && std::none_of(p.parameter, p.parameter + p.count, changes)) continue;
    const Matrix& m = packed_[index];
    share((m.tile_count() + kBlock - 1) / kBlock, [&](int64_t item) {
      for (int64_t tile = item * kBlock; tile < std::min((item + 1) * kBlock, m.tile_count()); ++tile) {
        uint8_t* at = const_cast<uint8_t*>(m.tiles) + tile * m.tile_bytes;
        const int64_t row = tile * kTileRows;
        const int rows = int(std::min<int64_t>(kTileRows, m.rows - row));
        for (int i = 0; i < p.count; ++i) {
          const ckdist_training_parameter& w = parameters_[p.parameter[i]];
          if (p.turned) packing_.columns(parameter(p.parameter[i]) + row, w.cols, rows, w.rows, at), at += tile_bytes(w.rows);
          else packing_.rows(parameter(p.parameter[i]) + row * w.cols, w.cols, rows, w.cols, at);
        }
      }
    });
  }
}

void Training::linear(int thread, const Step& step) {
  Product products[4];
  const int n = count(step.out, 4);
  for (int m = 0; m < n; ++m)
    products[m] = {packed_[step.pack[m]], operand(step.in[0]), batch_.tokens, step.out[m], step.parameter[m] < 0 ? nullptr : parameter(step.parameter[m]),
                   step.in[1]};
  multiply(thread, products, n);
}

void Training::linear_grad(int thread, const Step& step) {
  const Product product{packed_[step.pack[0]], operand(step.in[0]), batch_.tokens, step.out[0]};
  multiply(thread, &product, 1);
}

// Columns [64 item, ...) of x, (tokens, width): rows of a matrix whose columns are the tokens. A few tokens at a time, so
// that what is read once in rows and written in columns stays in the L1 cache.
void Training::turn_matrix(const Operand& x, int64_t width, int64_t tokens, int64_t item, uint8_t* tiles) const {
  for (int64_t first = 0; first < tokens; first += kTurned)
    for (int64_t at = item * kColumns; at < std::min((item + 1) * kColumns, width); at += kTileRows)
      packing_.operand_columns(x.row(first) + at * element_bytes(), x.stride, int(std::min<int64_t>(kTileRows, width - at)),
                               std::min<int64_t>(kTurned, tokens - first), tiles + at / kTileRows * tile_bytes(tokens) + first * column_bytes());
}

int64_t Training::turned_columns() const { return std::clamp<int64_t>(kTurnedBytes / stride(program_.max_tokens) / 16 * 16, 16, 64); }

// gradient (+)= dy turned times x, of each dy over one x. Who turns a few columns of dy also multiplies them, while they are in the L2 cache.
void Training::add_outer(int thread, const Matrix& x, int64_t tokens, const Outer* outers, int n) {
  const int64_t columns = turned_columns(), turned_stride = stride(tokens);
  int64_t items[5] = {0};
  for (int i = 0; i < n; ++i) items[i + 1] = items[i] + (outers[i].width + columns - 1) / columns;
  const int64_t parts = std::clamp<int64_t>(8 * pool_.size() / std::max<int64_t>(items[n], 1), 1, (x.tile_count() + kSumTiles - 1) / kSumTiles);
  share(items[n] * parts, [&](int64_t index) {
    const int64_t item = index / parts, part = index % parts;
    int i = 0;
    while (item >= items[i + 1]) ++i;
    const Outer& outer = outers[i];
    const int64_t at = (item - items[i]) * columns, rows = std::min(columns, outer.width - at);
    uint8_t* const turned = own(thread);
    for (int64_t first = 0; first < tokens; first += kTurned) {
      const bool last = tokens - first <= kTurned;
      packing_.turn(outer.dy.row(first) + at * element_bytes(), outer.dy.stride, last ? tokens - first : kTurned, rows, turned + first * element_bytes(),
                    turned_stride, last ? padded(tokens) - first : kTurned);
    }
    const int64_t end = x.tile_count() * (part + 1) / parts;
    for (int64_t tile = x.tile_count() * part / parts; tile < end; tile += kSumTiles)
      product_(x, tile, std::min(tile + kSumTiles, end), turned, turned_stride, rows, outer.gradient + at * x.rows, x.rows, outer.add);
  });
}

void Training::linear_weight_grad(int thread, const Step& step) {
  const int64_t cols = width(step.in[0]), tokens = batch_.tokens;
  uint8_t* const turned = workspace_->data();
  share(column_items(cols), [&](int64_t item) { turn_matrix(operand(step.in[0]), cols, tokens, item, turned); });
  Outer outers[4];
  const int n = count(step.in + 1, 4);
  for (int i = 0; i < n; ++i) outers[i] = {operand(step.in[i + 1]), width(step.in[i + 1]), gradient(step.gradient[i]), adds(step, i)};
  add_outer(thread, matrix(cols, tokens, turned), tokens, outers, n);
}

int64_t Training::workspace(const Step& step) const {
  const int64_t tokens = program_.max_tokens, chunks = (tokens + kSumRows - 1) / kSumRows;
  Carver c{nullptr};
  switch (step.op) {
    case ckdist_train_linear_weight_grad: c.bytes(round16(width(step.in[0])) / 16 * tile_bytes(tokens)); break;
    case ckdist_train_rms_norm_grad: c.floats(chunks * step.i[0]); break;
    case ckdist_train_bias_grad:
      for (int m = 0; m < count(step.in, 4); ++m) c.floats(chunks * width(step.in[m]));
      break;
    case ckdist_train_cross_entropy: loss_space(c, step); break;
    default: break;
  }
  return c.used;
}

}  // namespace ckdist
