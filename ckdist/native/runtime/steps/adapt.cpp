// Products of rows with the matrices A of their adapters (LoRA). The linear step after it multiplies them with B.
#include <algorithm>

#include "runtime/inference.h"

namespace ckdist {
namespace {

constexpr int64_t kMostRows = 64;  // rows at a time

struct Adapt : StepRun<Inference, ckdist_adapt_step> {
  void run() {
    const int64_t n = r.rows(step.step);
    const int64_t each = std::clamp<int64_t>((n + r.active() - 1) / r.active(), 1, kMostRows);
    const int64_t blocks = (n + each - 1) / each;
    r.take_items(thread, index, blocks * step.count, [&](int64_t item) {
      const int64_t begin = item / step.count * each;
      multiply(step.products[item % step.count], {begin, std::min(begin + each, n)});
    });
    r.finish(thread, index, step.products[0].out, n);
  }

  void multiply(const ckdist_product& p, Range rows) {
    const int64_t x_stride = r.value(p.x.first).stride;
    const uint8_t* const x = r.activations(thread, step.step, p.x.first);
    int64_t stride;
    float* const y = r.floats(p.out, &stride);
    r.each_adapter(step.step, rows, [&](int adapter, Range some) {
      const Matrix& a = r.matrix(p.weight.first + adapter);
      if (a.rows > 0 && a.cols > 0)
        r.multiply(thread, a, x + some.begin * x_stride, x_stride, some.end - some.begin, y + some.begin * stride,
                   stride);
    });
  }
};

const RegisteredKind<Adapt> kKind(ckdist_step_adapt);

}  // namespace
}  // namespace ckdist
