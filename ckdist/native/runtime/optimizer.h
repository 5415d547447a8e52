// One pass over an arena of parameters by the threads of a rank. The arena is divided into segments that are decayed
// or not.
#pragma once
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/pool.h"

namespace ckdist {

// Segment i is [ends[i - 1], ends[i]); decayed where decays[i] is not 0.
struct Segments {
  const int64_t* ends;
  const uint8_t* decays;
  int64_t count;
};

class Optimizer {
 public:
  Optimizer(const Kernels& kernels, std::shared_ptr<Pool> pool);

  // The sum of x[i]^2, whose bits depend on x alone: of the number of threads they do not. Infinite or NaN where any x
  // is.
  double sum_squares(const float* x, int64_t n);
  // `keep` of the numbers is used where a segment is decayed, 1 elsewhere.
  void adamw(const AdamwNumbers& numbers, const Segments& segments, float* p, const float* g, float* mean,
             float* square, int64_t n);
  void sgd(const SgdNumbers& numbers, const Segments& segments, float* p, const float* g, float* momentum, int64_t n);

 private:
  template <class Numbers, class Update>
  void each(Numbers numbers, const Segments& segments, int64_t n, Update&& update);

  const Kernels& kernels_;
  const std::shared_ptr<Pool> pool_;
  std::vector<double> sums_;
};

}  // namespace ckdist
