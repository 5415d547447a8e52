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
    c.tiles = std::clamp<int64_t>(kTileBytes / (std::min(products[p].matrix.cols, kSumColumns) * column_bytes()), 1, kMaxTiles);
    c.tiles = (all + (all + c.tiles - 1) / c.tiles - 1) / ((all + c.tiles - 1) / c.tiles);  // as even as can be
    c.tile_parts = (all + c.tiles - 1) / c.tiles, c.token_parts = (products[p].tokens + kTokens - 1) / kTokens;
    items += c.tile_parts * c.token_parts;
  }
  share(items, [&](int64_t item) {
    int p = 0;
    for (; item >= cuts[p].tile_parts * cuts[p].token_parts; ++p) item -= cuts[p].tile_parts * cuts[p].token_parts;
    const Product& product = products[p];
    const Cut& c = cuts[p];
    const int64_t tile = item / c.token_parts * c.tiles, token = item % c.token_parts * kTokens;
    const int64_t tiles = std::min(c.tiles, product.matrix.tile_count() - tile), tokens = std::min(kTokens, product.tokens - token);
    const int64_t rows = std::min(tiles * kTileRows, product.matrix.rows - tile * kTileRows), cols = product.matrix.cols;
    float* const y = product.y + token * product.y_stride + tile * kTileRows;
    float* const sums = reinterpret_cast<float*>(own(thread));  // (tokens, rows of the tiles)
    for (int64_t column = 0; column < cols; column += kSumColumns) {
      Matrix part{type_, rows, std::min(kSumColumns, cols - column), product.matrix.tile_bytes, nullptr};
      part.tiles = product.matrix.tiles + tile * part.tile_bytes + column * column_bytes();
      const uint8_t* const x = product.x + token * product.x_stride + column * element_bytes();
      const bool add = product.accumulate || column > 0;
      this->product().multiply(part, 0, tiles, x, product.x_stride, tokens, add ? sums : y, add ? tiles * kTileRows : product.y_stride);
      if (add)
        for (int64_t t = 0; t < tokens; ++t) kernels_.elementwise.add(sums + t * tiles * kTileRows, rows, y + t * product.y_stride);
    }
    if (product.bias)
      for (int64_t t = 0; t < tokens; ++t) kernels_.elementwise.add(product.bias + tile * kTileRows, rows, y + t * product.y_stride);
  });
}

void Training::pack(int) {
  constexpr int64_t kBlock = 8;  // tiles of an item
  for (size_t index = 0; index < packs_.size(); ++index) {
    const ckdist_training_pack& p = packs_[index];
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
  const int64_t cols = width(step.in[0]), x_stride = stride(cols);
  uint8_t* const x = workspace_->data();  // (tokens, cols)
  share_rows([&](int64_t t) { packing_.convert(value(step.in[0], t), cols, ActivationRow::padded(cols), x + t * x_stride); });
  Product products[4];
  const int n = count(step.out, 4);
  for (int m = 0; m < n; ++m)
    products[m] = {packed_[step.pack[m]], x, x_stride, batch_.tokens, value(step.out[m]), width(step.out[m]),
                   step.parameter[m] < 0 ? nullptr : parameter(step.parameter[m]), false};
  multiply(thread, products, n);
}

void Training::linear_grad(int thread, const Step& step) {
  const Matrix& m = packed_[step.pack[0]];
  const int64_t dy_stride = stride(m.cols);
  uint8_t* const dy = workspace_->data();  // (tokens, the outputs side by side)
  const int n = count(step.in, 4);
  share_rows([&](int64_t t) {
    int64_t at = 0;
    for (int i = 0; i < n; ++i) {
      const int64_t padded = i == n - 1 ? ActivationRow::padded(m.cols) - at : round16(width(step.in[i]));
      packing_.convert(value(step.in[i], t), width(step.in[i]), padded, dy + t * dy_stride + at * element_bytes());
      at += padded;
    }
  });
  const Product product{m, dy, dy_stride, batch_.tokens, value(step.out[0]), width(step.out[0]), nullptr, false};
  multiply(thread, &product, 1);
}

Training::WeightGradSpace Training::weight_grad_space(Carver& c, const Step& step) const {
  int64_t rows = 0;
  for (int i = 1; i <= count(step.in + 1, 4); ++i) rows += width(step.in[i]);
  const int64_t tokens = program_.max_tokens;
  return {c.bytes(round16(width(step.in[0])) / 16 * tile_bytes(tokens)), c.bytes(rows * stride(tokens))};
}

void Training::linear_weight_grad(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const WeightGradSpace space = weight_grad_space(carver, step);
  const int64_t cols = width(step.in[0]), tokens = batch_.tokens, dy_stride = stride(tokens), tiles = round16(cols) / 16;
  const int n = count(step.in + 1, 4);
  int64_t blocks[5] = {tiles};  // items of x, then of each dy
  for (int i = 1; i <= n; ++i) blocks[i] = blocks[i - 1] + (width(step.in[i]) + kColumns - 1) / kColumns;
  share(blocks[n], [&](int64_t item) {
    if (item < tiles)
      return packing_.columns(value(step.in[0]) + item * 16, cols, int(std::min<int64_t>(16, cols - item * 16)), tokens, space.x + item * tile_bytes(tokens));
    int i = 1;
    uint8_t* out = space.dy;
    for (; item >= blocks[i]; ++i) out += width(step.in[i]) * dy_stride;
    const int64_t at = (item - blocks[i - 1]) * kColumns, w = width(step.in[i]);
    packing_.turn(value(step.in[i]) + at, w, tokens, std::min<int64_t>(kColumns, w - at), out + at * dy_stride, dy_stride, ActivationRow::padded(tokens));
  });
  Product products[4];
  uint8_t* dy = space.dy;
  for (int i = 0; i < n; ++i) {
    const int64_t rows = width(step.in[i + 1]);
    products[i] = {matrix(cols, tokens, space.x), dy, dy_stride, rows, gradient(step.gradient[i]), cols, nullptr, true};
    dy += rows * dy_stride;
  }
  multiply(thread, products, n);
}

int64_t Training::workspace(const Step& step) const {
  const int64_t tokens = program_.max_tokens, chunks = (tokens + kSumRows - 1) / kSumRows;
  Carver c{nullptr};
  switch (step.op) {
    case ckdist_train_linear: c.bytes(tokens * stride(width(step.in[0]))); break;
    case ckdist_train_linear_grad: c.bytes(tokens * stride(packed_[step.pack[0]].cols)); break;
    case ckdist_train_linear_weight_grad: weight_grad_space(c, step); break;
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
