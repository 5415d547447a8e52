// Output projection, log-softmax and both gradients in one step, over chunks of tokens: the logits of a whole batch never exist.
#include <algorithm>
#include <cmath>

#include "train/training.h"

namespace ckdist {

int64_t Training::loss_chunk() const {
  const int64_t fitting = std::clamp<int64_t>(kLogitBytes / (4 * program_.vocab) / 16 * 16, 64, program_.max_tokens < 64 ? 64 : program_.max_tokens);
  return std::min(fitting, program_.max_tokens);
}

Training::LossSpace Training::loss_space(Carver& c, const Step& step) const {
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]), vocab = program_.vocab;
  LossSpace s{};
  s.x = c.bytes(chunk * stride(hidden));
  s.logits = c.floats(chunk * vocab);
  if (step.out[0] >= 0) s.d = c.bytes(chunk * stride(vocab));
  if (step.gradient[0] >= 0) s.x_turned = c.bytes((hidden + 15) / 16 * tile_bytes(chunk));
  return s;
}

void Training::cross_entropy(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const LossSpace s = loss_space(carver, step);
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]), vocab = program_.vocab, x_stride = stride(hidden), d_stride = stride(vocab);
  const bool by_x = step.out[0] >= 0, by_head = step.gradient[0] >= 0;
  const float cap = step.f[0];
  for (int64_t first = 0; first < batch_.tokens; first += chunk) {
    const int64_t n = std::min(chunk, batch_.tokens - first);
    const float* const x = value(step.in[0], first);
    share(n, [&](int64_t t) { packing_.convert(x + t * hidden, hidden, padded(hidden), s.x + t * x_stride); });
    const Product logits{packed_[step.pack[0]], s.x, x_stride, n, s.logits, vocab, nullptr};
    multiply(thread, &logits, 1);
    share(n, [&](int64_t t) {
      float* const row = s.logits + t * vocab;
      const int64_t target = batch_.targets[first + t];
      losses_[first + t] = 0;
      if (target < 0) {
        std::fill(row, row + vocab, 0.f);
      } else {
        if (cap != 0) kernels_.elementwise.soft_cap(row, cap, vocab);
        const float largest = *std::max_element(row, row + vocab);
        const double log_sum_exp = largest + std::log(kernels_.elementwise.sum_exp(row, vocab, largest, 1, nullptr));
        losses_[first + t] = log_sum_exp - row[target];
        if (by_x || by_head) kernels_.gradient.cross_entropy(row, vocab, target, cap, float(log_sum_exp));
      }
      if (by_x) packing_.convert(row, vocab, padded(vocab), s.d + t * d_stride);
    });
    if (by_x) {
      const Product dx{packed_[step.pack[1]], s.d, d_stride, n, value(step.out[0], first), hidden, nullptr};
      multiply(thread, &dx, 1);
    }
    if (by_head) {
      share(column_items(hidden), [&](int64_t item) { turn_matrix(x, hidden, n, item, s.x_turned); });
      const Outer outer{s.logits, vocab, gradient(step.gradient[0])};
      add_outer(thread, matrix(hidden, n, s.x_turned), n, &outer, 1);
    }
  }
}

}  // namespace ckdist
