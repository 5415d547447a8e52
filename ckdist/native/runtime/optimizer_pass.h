// One pass of a rank's threads over an arena of parameters. The arena has parts with and without weight decay.
#pragma once
#include "runtime/pool.h"
#include "runtime/updated_parameters.h"

namespace ckdist {

// A weight as matrices that follow one another.
struct MatrixStack {
  int64_t matrices, rows, columns;
};
// `scale`: factor of the gradient. `beta`: decay of the means. `keep` = 1 - learning rate * weight decay.
struct AdafactorNumbers {
  double scale, beta, rate, keep;
};
// Codes of 8 bits, and a scale for each block of them.
struct QuantizedMoment {
  uint8_t* codes;
  float* scales;
};

class Optimizer {
 public:
  Optimizer(const Kernels& kernels, std::shared_ptr<Pool> pool);

  // The sum of x[i]^2. Its bits do not depend on the number of threads. Infinite or NaN if any x is.
  double sum_squares(const float* x, int64_t n);
  // The factor numbers.keep applies to parts with weight decay; other parts use 1.
  void adamw(const AdamwNumbers& numbers, const ckdist_update& update, float* mean, float* square);
  // Adafactor of matrices, with a mean for each row and each column, and of a vector.
  void adafactor(const AdafactorNumbers& numbers, const MatrixStack& shape, const ckdist_update& update, float* row,
                 float* column);
  void adafactor(const AdafactorNumbers& numbers, const ckdist_update& update, float* square);
  void adamw_8bit(const AdamwNumbers& numbers, const ckdist_update& update, const QuantizedMoment& mean,
                  const QuantizedMoment& square);
  void sgd(const SgdNumbers& numbers, const ckdist_update& update, float* momentum);
  // The parameters as they are read and written in an update.
  UpdatedParameters parameters(const ckdist_update& update) const { return {kernels_, update}; }

 private:
  // Runs body(begin, end) for the parts of [0, n), `size` items each, which the threads divide.
  template <class Body>
  void each_part(int64_t n, int64_t size, Body&& body) {
    const int threads = pool_->size();
    const int64_t parts = (n + size - 1) / size;
    pool_->run(threads, [&](int thread) {
      for (int64_t part = parts * thread / threads; part < parts * (thread + 1) / threads; ++part)
        body(part * size, std::min(n, (part + 1) * size));
    });
  }
  template <class Numbers, class Step>
  void each_piece(const Numbers& numbers, const ckdist_update& update, Step&& step);

  const Kernels& kernels_;
  const std::shared_ptr<Pool> pool_;
  std::vector<double> sums_;
};

}  // namespace ckdist
