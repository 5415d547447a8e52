// The matrix products of training: all are y[t][row] = dot(matrix row, x[t]) of packed tiles, as in serving.
//   y = x W^T: W is the matrix, the tokens' x are the activations.
//   dx = dy W: W transposed is the matrix; of several W over one x, all of them side by side, so that their sum is one
//   product. dW = dy^T x: x transposed is the matrix, dy transposed the activations; the sum goes over the tokens.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// out[t][column] = dot(matrix row, x[t]) + bias (+ residual), tokens counted from `first` in `out` and `residual`.
struct Product {
  Matrix matrix;
  Operand x;
  int64_t tokens;
  int out;  // a value
  const float* bias = nullptr;
  int residual = -1;
  int64_t first = 0;
  Operand to{nullptr, 0};  // rows in place of the value's
};
// gradient[column of dy][column of x] (+)= sum over the tokens of dy x.
struct Outer {
  Operand dy;
  int64_t width;
  float* gradient;
  bool add;  // else overwrite
};

// What all threads of a step do together; each call ends with a barrier.
class Products {
 public:
  static constexpr int kMost = 4;         // products of one call
  static constexpr int64_t kTokens = 64;  // of an item of a product at most

  Products(Training& r, int thread, int index) : r_(r), thread_(thread), index_(index) {}

  void multiply(const Product* products, int count);
  void add_outer(const Matrix& x, int64_t tokens, const Outer* outers, int count);
  // Columns [64 item, ...) of x, transposed.
  void transpose_matrix(const Operand& x, int64_t width, int64_t tokens, int64_t item, uint8_t* tiles) const;
  // All of x, transposed.
  void transpose_all(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles);

  // Tiles of the matrix that one item takes, of about so many bytes.
  static int64_t item_tiles(const Training& r, const Matrix& matrix, int64_t bytes);
  static int64_t thread_bytes(const Training& r);

 private:
  void transpose(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles, int64_t tile_bytes) const;
  void outer_item(const Matrix& x, int64_t tokens, const Outer& outer, int64_t at, int64_t begin, int64_t end);

  Training& r_;
  const int thread_, index_;
};

}  // namespace ckdist
