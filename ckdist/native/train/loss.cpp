// Output projection, log-softmax and both gradients in one step, over chunks of tokens: the logits of a whole batch never exist.
#include <algorithm>
#include <cmath>

#include "train/training.h"

namespace ckdist {

// Tokens whose gradients by logits exist at once.
int64_t Training::loss_chunk() const {
  const int64_t fitting = std::max<int64_t>(kLogitBytes / stride(program_.vocab) / kLossTokens, 2) * kLossTokens;
  return std::min(fitting, program_.max_tokens);
}

Training::LossSpace Training::loss_space(Carver& c, const Step& step) const {
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]);
  LossSpace s{};
  if (step.out[0] >= 0 || step.gradient[0] >= 0) s.d = c.bytes(chunk * stride(program_.vocab));
  if (step.gradient[0] >= 0) s.x_turned = c.bytes((hidden + 15) / 16 * tile_bytes(chunk));
  return s;
}

void Training::cross_entropy(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const LossSpace s = loss_space(carver, step);
  const Packs packs = pack(thread, step, carver);
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]), vocab = program_.vocab;
  const int64_t row = (vocab + 15) / 16 * 16 + 16;
  const bool by_x = step.out[0] >= 0, by_head = step.gradient[0] >= 0;
  const float cap = step.f[0];
  const Matrix& head = packs.matrix[0];
  const Operand d{s.d, stride(vocab)};
  for (int64_t first = 0; first < batch_.tokens; first += chunk) {
    const int64_t n = std::min(chunk, batch_.tokens - first);
    const Operand x = operand(step.in[0], first);
    // Who computes a few tokens' logits also makes their gradients: in floats they never leave the cache.
    share((n + kLossTokens - 1) / kLossTokens, [&](int64_t item) {
      const int64_t begin = item * kLossTokens, end = std::min(begin + kLossTokens, n);
      float* const logits = reinterpret_cast<float*>(own(thread));  // (tokens, vocab)
      product_.multiply(head, 0, head.tile_count(), x.row(begin), x.stride, end - begin, logits, row, false);
      for (int64_t t = begin; t < end; ++t) {
        float* const of = logits + (t - begin) * row;
        const int64_t target = batch_.targets[first + t];
        losses_[first + t] = 0;
        if (target < 0) {
          if (by_x || by_head) std::fill_n(d.row(t), d.stride, uint8_t{0});
        } else {
          if (cap != 0) kernels_.elementwise.soft_cap(of, cap, vocab);
          const float largest = kernels_.gradient.largest(of, vocab);
          const double log_sum_exp = largest + std::log(kernels_.elementwise.sum_exp(of, vocab, largest, 1, nullptr));
          losses_[first + t] = log_sum_exp - of[target];
          if (by_x || by_head) {
            kernels_.row.cross_entropy(of, vocab, target, cap, float(log_sum_exp), {d.row(t), type_ == Type::bf16});
            std::fill_n(d.row(t) + vocab * element_bytes(), (padded(vocab) - vocab) * element_bytes(), uint8_t{0});
          }
        }
      }
    });
    if (by_x) {
      const Product dx{packs.matrix[1], d, n, step.out[0], nullptr, -1, first};
      multiply(thread, &dx, 1);
    }
    if (by_head) {
      share(column_items(hidden), [&](int64_t item) { turn_matrix(x, hidden, n, item, s.x_turned); });
      const Outer outer{d, vocab, gradient(step.gradient[0]), first > 0 || adds(step, 0)};
      add_outer(thread, matrix(hidden, n, s.x_turned), n, &outer, 1);
    }
  }
}

}  // namespace ckdist
