// Output projection, log-softmax and both gradients in one step, over chunks of tokens: the logits of a whole batch
// never exist. Who computes some of a few tokens' logits also makes exp(logit - the largest of these) of them, while
// they are in the cache; what the parts have in common is found when all are there. Where many tokens have no target,
// as in chats, those that have one are gathered first.
#include <algorithm>
#include <cmath>

#include "kernels/half.h"
#include "train/training.h"

namespace ckdist {

// Tokens whose gradients by logits exist at once.
int64_t Training::loss_chunk() const {
  return std::min(std::max<int64_t>(kLogitBytes / stride(program_.vocab, element_bytes()) / kTokens, 1) * kTokens,
                  program_.max_tokens);
}

Training::LossSpace Training::loss_space(Carver& c, const Step& step) const {
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]),
                columns = item_tiles(packed_[step.pack[0]]) * kTileRows;
  const int64_t parts = (program_.vocab + columns - 1) / columns;
  LossSpace s{};
  if (step.out[0] >= 0 || step.gradient[0] >= 0) s.d = c.bytes(chunk * stride(program_.vocab, element_bytes()));
  if (step.gradient[0] >= 0) s.x_turned = c.bytes((hidden + 15) / 16 * tile_bytes(chunk));
  s.x = c.bytes(chunk * row_stride(step.in[0]));
  if (step.out[0] >= 0) s.dx = c.bytes(chunk * row_stride(step.out[0]));
  s.largest = c.floats(chunk * parts), s.sums = c.floats(chunk * parts), s.logits = c.floats(chunk);
  return s;
}

// Of n tokens: s.largest and s.sums of every part of the logits, (tokens, parts), s.logits of the targets, and s.d
// relative to the parts' largest.
void Training::logits(int thread, const Step& step, const Matrix& head, const LossSpace& s, const Operand& x,
                      int64_t first, int64_t n) {
  const int64_t tiles = item_tiles(head), parts = (head.tile_count() + tiles - 1) / tiles,
                token_parts = (n + kTokens - 1) / kTokens;
  const int64_t row = (tiles + 1) * kTileRows, d_stride = stride(program_.vocab, element_bytes());
  share(parts * token_parts, [&](int64_t item) {
    const int64_t part = item / token_parts, begin = item % token_parts * kTokens, end = std::min(begin + kTokens, n);
    const int64_t tile = part * tiles, last = std::min(tile + tiles, head.tile_count()), column = tile * kTileRows;
    const int64_t columns = std::min(last * kTileRows, program_.vocab) - column;
    float* const sums = reinterpret_cast<float*>(own(thread));  // (tokens, columns)
    Matrix some = head;
    some.rows = columns, some.tiles += tile * head.tile_bytes;
    product_.multiply(some, 0, last - tile, x.row(begin), x.stride, end - begin, sums, row, false);
    for (int64_t t = begin; t < end; ++t) {
      const float* const of = sums + (t - begin) * row;
      const int64_t own_target = batch_.targets[learned(first + t)], target = own_target - column;
      if (own_target < 0) continue;
      if (target >= 0 && target < columns) s.logits[t] = of[target];
      const Row d{s.d ? s.d + t * d_stride + column * element_bytes() : nullptr, narrow_};
      s.sums[t * parts + part] = kernels_.softmax.part(of, columns, step.f[0], s.largest + t * parts + part, d);
    }
  });
}

// The loss of one token, and its row of s.d.
void Training::loss_of(const Step& step, int64_t parts, int64_t columns, const LossSpace& s, int64_t first,
                       int64_t token) {
  const int64_t vocab = program_.vocab, of = learned(first + token), target = batch_.targets[of];
  const Row d{s.d ? s.d + token * stride(vocab, element_bytes()) : nullptr, narrow_};
  if (target < 0) {
    if (d.at) std::fill_n(d.at, stride(vocab, element_bytes()), uint8_t{0});
    return;
  }
  const float *const largest = s.largest + token * parts, *const sums = s.sums + token * parts;
  const float most = *std::max_element(largest, largest + parts), cap = step.f[0];
  double sum = 0;
  for (int64_t part = 0; part < parts; ++part) sum += sums[part] * std::exp(double(largest[part]) - most);
  const float logit = cap == 0 ? s.logits[token] : cap * std::tanh(s.logits[token] / cap);
  const double log_sum_exp = most + std::log(sum);
  losses_[of] = log_sum_exp - logit;
  if (!d.at) return;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t column = part * columns;
    const Row some{d.at + column * element_bytes(), d.narrow};
    kernels_.row.scale(some, float(std::exp(largest[part] - log_sum_exp)), std::min(columns, vocab - column), some);
  }
  const float slope = cap == 0 ? 1 : 1 - logit / cap * (logit / cap),
              own = float(std::expm1(logit - log_sum_exp)) * slope;
  if (d.narrow) reinterpret_cast<uint16_t*>(d.at)[target] = bf16_of_float(own);
  else reinterpret_cast<float*>(d.at)[target] = own;
  std::fill_n(d.at + vocab * element_bytes(), (padded(vocab) - vocab) * element_bytes(), uint8_t{0});
}

void Training::cross_entropy(int thread, const Step& step) {
  Carver carver{workspace_->data()};
  const LossSpace s = loss_space(carver, step);
  const Packs packs = pack(thread, step, carver);
  const int64_t chunk = loss_chunk(), hidden = width(step.in[0]), vocab = program_.vocab;
  const int64_t columns = item_tiles(packs.matrix[0]) * kTileRows, parts = (vocab + columns - 1) / columns;
  const Operand d{s.d, stride(vocab, element_bytes())};
  const int64_t count = int64_t(batch_.learned.size());
  const bool all = all_learned();
  if (step.out[0] >= 0 && !all)
    share_tokens([&](int64_t t) {
      if (batch_.targets[t] < 0) std::fill_n(operand(step.out[0], t).at, row_bytes(step.out[0]), uint8_t{0});
    });
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t n = std::min(chunk, count - first);
    const Operand x = all ? operand(step.in[0], first) : Operand{s.x, row_stride(step.in[0])};
    if (!all)
      share(n, [&](int64_t token) {
        std::copy_n(operand(step.in[0], learned(first + token)).at, row_bytes(step.in[0]), x.row(token));
      });
    logits(thread, step, packs.matrix[0], s, x, first, n);
    share(n, [&](int64_t token) { loss_of(step, parts, columns, s, first, token); });
    if (step.out[0] >= 0) {
      Product dx{packs.matrix[1], d, n, step.out[0], nullptr, -1, first};
      if (!all) dx.to = {s.dx, row_stride(step.out[0])};
      multiply(thread, &dx, 1);
      if (!all)
        share(n, [&](int64_t token) {
          std::copy_n(dx.to.row(token), row_bytes(step.out[0]), operand(step.out[0], learned(first + token)).at);
        });
    }
    if (step.gradient[0] >= 0) {
      share(column_items(hidden), [&](int64_t item) { turn_matrix(x, hidden, n, item, s.x_turned); });
      const Outer outer{d, vocab, gradient(step.gradient[0]), first > 0 || adds(step, 0)};
      add_outer(thread, matrix(hidden, n, s.x_turned), n, &outer, 1);
    }
  }
}

}  // namespace ckdist
