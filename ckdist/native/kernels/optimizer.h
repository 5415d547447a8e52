// Updates parameters from their gradients, element by element in float32, with the same bits on every ISA.
#pragma once
#include <cstdint>

namespace ckdist {

// `scale`: factor that the stored gradient already includes. The caller applies Adam's bias corrections:
// `rate` = learning rate / (1 - beta1^t), `root` = 1 / sqrt(1 - beta2^t). `keep` = 1 - learning rate * weight decay.
struct AdamwNumbers {
  float scale, beta1, beta2, eps, rate, root, keep;
};
// `first`: sets the momentum to the gradient.
struct SgdNumbers {
  float scale, momentum, rate, keep;
  bool first;
};

struct OptimizerKernel {
  // Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
  void (*adamw)(const AdamwNumbers& numbers, float* p, const float* g, float* mean, float* square, int64_t n);
  // p = keep * p - rate * m, with m = momentum * m + g.
  void (*sgd)(const SgdNumbers& numbers, float* p, const float* g, float* m, int64_t n);
  // Rounds to one of the two next bfloat16, with probabilities whose mean is x[i] (stochastic rounding). The random
  // number of x[i] is a hash of `key` and column + i.
  void (*round)(const float* x, int64_t n, uint32_t key, uint32_t column, uint16_t* out);
  // Sum of x[i]^2 in double: 16 strided sums, which are added in order.
  double (*sum_squares)(const float* x, int64_t n);
};

}  // namespace ckdist
