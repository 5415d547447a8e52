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
  if (step.gradient[0] >= 0) {
    s.x_turned = c.bytes((hidden + 15) / 16 * tile_bytes(chunk));
    s.d_turned = c.bytes(vocab * stride(chunk));
  }
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
    share(n, [&](int64_t t) { packing_.convert(x + t * hidden, hidden, ActivationRow::padded(hidden), s.x + t * x_stride); });
    const Product logits{packed_[step.pack[0]], s.x, x_stride, n, s.logits, vocab, nullptr, false};
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
      if (by_x) packing_.convert(row, vocab, ActivationRow::padded(vocab), s.d + t * d_stride);
    });
    if (by_head) {
      const int64_t tiles = (hidden + 15) / 16, turned_stride = stride(n);
      share(tiles + (vocab + kColumns - 1) / kColumns, [&](int64_t item) {
        if (item < tiles) return packing_.columns(x + item * 16, hidden, int(std::min<int64_t>(16, hidden - item * 16)), n, s.x_turned + item * tile_bytes(n));
        const int64_t at = (item - tiles) * kColumns;
        packing_.turn(s.logits + at, vocab, n, std::min<int64_t>(kColumns, vocab - at), s.d_turned + at * turned_stride, turned_stride, ActivationRow::padded(n));
      });
    }
    Product products[2];
    int count = 0;
    if (by_x) products[count++] = {packed_[step.pack[1]], s.d, d_stride, n, value(step.out[0], first), hidden, nullptr, false};
    if (by_head) products[count++] = {matrix(hidden, n, s.x_turned), s.d_turned, stride(n), vocab, gradient(step.gradient[0]), hidden, nullptr, true};
    if (count) multiply(thread, products, count);
  }
}

}  // namespace ckdist
