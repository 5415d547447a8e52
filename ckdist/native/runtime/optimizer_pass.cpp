#include "runtime/optimizer_pass.h"

#include <numeric>
#include <utility>

namespace ckdist {
namespace {

constexpr int64_t kSummed = 1 << 14;  // elements whose squares are summed at once; determines the order of the sum
constexpr int64_t kLine = 16;         // floats of a cache line, the unit of a thread's part

}  // namespace

Optimizer::Optimizer(const Kernels& kernels, std::shared_ptr<Pool> pool) : kernels_(kernels), pool_(std::move(pool)) {}

double Optimizer::sum_squares(const float* x, int64_t n) {
  sums_.assign(size_t((n + kSummed - 1) / kSummed), 0.0);
  each_part(n, kSummed, [&](int64_t begin, int64_t end) {
    sums_[size_t(begin / kSummed)] = kernels_.optimizer.sum_squares(x + begin, end - begin);
  });
  return std::accumulate(sums_.begin(), sums_.end(), 0.0);
}

// Calls step(numbers, values, first, count) for pieces of the parameters.
template <class Numbers, class Step>
void Optimizer::each_piece(const Numbers& numbers, const ckdist_update& update, Step&& step) {
  const int threads = pool_->size();
  const int64_t lines = (update.n + kLine - 1) / kLine;
  Numbers kept = numbers;
  kept.keep = 1.0f;
  pool_->run(threads, [&](int thread) {
    int64_t at = lines * thread / threads * kLine;
    const int64_t end = std::min(update.n, lines * (thread + 1) / threads * kLine);
    int64_t part = std::upper_bound(update.ends, update.ends + update.parts, at) - update.ends;
    for (; at < end; ++part) {
      const int64_t until = std::min(end, update.ends[part]);
      const Numbers& own = update.decays[part] ? numbers : kept;
      parameters(update).each(part, at, until - at, [&](float* p, int64_t i, int64_t n) { step(own, p, i, n); });
      at = until;
    }
  });
}

void Optimizer::adamw(const AdamwNumbers& numbers, const ckdist_update& update, float* mean, float* square) {
  each_piece(numbers, update, [&](const AdamwNumbers& k, float* p, int64_t i, int64_t n) {
    kernels_.optimizer.adamw(k, p, update.gradients + i, mean + i, square + i, n);
  });
}

void Optimizer::sgd(const SgdNumbers& numbers, const ckdist_update& update, float* momentum) {
  each_piece(numbers, update, [&](const SgdNumbers& k, float* p, int64_t i, int64_t n) {
    kernels_.optimizer.sgd(k, p, update.gradients + i, momentum + i, n);
  });
}

}  // namespace ckdist
