// The matrix products of training. All compute y[t][row] = dot(matrix row, x[t]) on packed tiles, as in serving.
//   y = x W^T: the matrix is W, the activations are the tokens' x.
//   dx = dy W: the matrix is W transposed. Several W over one x lie side by side, so that their sum is one product.
//   dW = dy^T x: the matrix is x transposed, the activations are dy transposed. The sum is over the tokens.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// out[t][column] = dot(matrix row, x[t]) + bias (+ residual). Row `first` of `out` and `residual` is token 0.
struct Product {
  Matrix matrix;
  Operand x;
  int64_t tokens;
  int out;  // index of a value
  const float* bias = nullptr;
  int residual = -1;
  int64_t first = 0;
  Operand to{nullptr, 0};     // if set: rows to write instead of the value's
  uint8_t* strips = nullptr;  // Products::strips_bytes; products of one x share them
};
// gradient[column of dy][column of x] (+)= sum over tokens of dy * x.
struct Outer {
  Operand dy;
  int64_t width;
  float* gradient;
  bool add;  // false: overwrite
};

// Products that all threads of a step compute together. Each public non-const call ends with a barrier.
class Products {
 public:
  static constexpr int kMost = 4;         // products of one call
  static constexpr int64_t kTokens = 64;  // maximum tokens of a product's item

  Products(Training& r, int thread, int index) : r_(r), thread_(thread), index_(index) {}

  void multiply(const Product* products, int count);
  void add_outer(const Matrix& x, int64_t tokens, const Outer* outers, int count);
  // Packs rows of x for a level with strips.
  void pack_strips(const Operand& x, int64_t width, int64_t tokens, uint8_t* strips);
  void transpose_all(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles);

  // Tiles of the matrix that one item takes: about `bytes` bytes.
  static int64_t item_tiles(const Training& r, const Matrix& matrix, int64_t bytes);
  static int64_t thread_bytes(const Training& r);
  // Bytes in which the level packs the `x` of a product; 0 if it reads the rows in place.
  static int64_t strips_bytes(const Training& r, int64_t width, int64_t tokens);

 private:
  // The division of a product into items.
  struct Parts {
    int64_t tiles, tokens, by_tiles, by_tokens;
    int64_t items() const { return by_tiles * by_tokens; }
  };
  void divide(const Product* products, int n, Parts* parts) const;
  void produce(const Product& product, const Parts& parts, int64_t item);
  void add_outer_strips(const Matrix& x, int64_t tokens, const Outer* outers, int count);
  void outer_strips(const Matrix& x, int64_t tokens, const Outer& outer, int64_t at, int64_t rows, int64_t begin,
                    int64_t end);
  void transpose(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles, int64_t tile_bytes) const;
  void outer_item(const Matrix& x, int64_t tokens, const Outer& outer, int64_t at, int64_t begin, int64_t end,
                  bool transposed);

  Training& r_;
  const int thread_, index_;
};

}  // namespace ckdist
