#include "runtime/optimizer_pass.h"

#include <algorithm>
#include <utility>

namespace ckdist {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements whose squares are summed at once; determines the order of the sum
constexpr int64_t kLine = 16;        // floats of a cache line, the unit of a thread's part

}  // namespace

Optimizer::Optimizer(const Kernels& kernels, std::shared_ptr<Pool> pool) : kernels_(kernels), pool_(std::move(pool)) {}

double Optimizer::sum_squares(const float* x, int64_t n) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  sums_.assign(blocks, 0.0);
  const int threads = pool_->size();
  pool_->run(threads, [&](int thread) {
    for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b)
      sums_[b] = kernels_.optimizer.sum_squares(x + b * kBlock, std::min(kBlock, n - b * kBlock));
  });
  double total = 0;
  for (double sum : sums_) total += sum;
  return total;
}

template <class Numbers, class Update>
void Optimizer::each(Numbers numbers, const Segments& segments, int64_t n, Update&& update) {
  const int threads = pool_->size();
  const int64_t lines = (n + kLine - 1) / kLine;
  Numbers kept = numbers;
  kept.keep = 1.0f;
  pool_->run(threads, [&](int thread) {
    int64_t at = lines * thread / threads * kLine;
    const int64_t end = std::min(n, lines * (thread + 1) / threads * kLine);
    int64_t s = std::upper_bound(segments.ends, segments.ends + segments.count, at) - segments.ends;
    for (; at < end; ++s) {
      const int64_t until = std::min(end, segments.ends[s]);
      update(segments.decays[s] ? numbers : kept, s, at, until - at);
      at = until;
    }
  });
}

void Optimizer::adamw(const AdamwNumbers& numbers, const Segments& segments, const Updated& those, float* mean,
                      float* square) {
  each(numbers, segments, those.size, [&](const AdamwNumbers& k, int64_t part, int64_t at, int64_t count) {
    those.parameters.each(part, at, count, [&](float* p, int64_t i, int64_t n) {
      kernels_.optimizer.adamw(k, p, those.gradients + i, mean + i, square + i, n);
    });
  });
}

void Optimizer::sgd(const SgdNumbers& numbers, const Segments& segments, const Updated& those, float* momentum) {
  each(numbers, segments, those.size, [&](const SgdNumbers& k, int64_t part, int64_t at, int64_t count) {
    those.parameters.each(part, at, count, [&](float* p, int64_t i, int64_t n) {
      kernels_.optimizer.sgd(k, p, those.gradients + i, momentum + i, n);
    });
  });
}

}  // namespace ckdist
