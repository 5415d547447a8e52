// Causal grouped-query attention within packed sequences, and its gradient from the saved log-sum-exp (Dao et al. 2022,
// arXiv:2205.14135). An item is one kv-head of one sequence with all query heads that share it, so nothing is written twice.
// All products are those of packed tiles; blocks of keys that no query of a block sees are left out.
#include <algorithm>

#include "train/training.h"

namespace ckdist {

namespace {
int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }
int64_t tiles(int64_t n) { return (n + 15) / 16; }
}  // namespace

void Training::attend(int thread, const Step& step, bool gradient) {
  const int64_t sequences = int64_t(batch_.starts.size()) - 1;
  share(sequences * program_.kv_heads, [&](int64_t item) {
    const int sequence = int(item / program_.kv_heads), kv_head = int(item % program_.kv_heads);
    if (batch_.starts[sequence + 1] == batch_.starts[sequence]) return;
    gradient ? attend_grad_item(thread, step, sequence, kv_head) : attend_item(thread, step, sequence, kv_head);
  });
}

Training::AttendSpace Training::attend_space(Carver& c, int64_t tokens) const {
  const int64_t d = program_.head_dim;
  AttendSpace s;
  s.k = c.bytes(tiles(tokens) * tile_bytes(d));
  s.v = c.bytes(tiles(d) * tile_bytes(tokens));
  s.q = c.bytes(kQueries * stride(d));
  s.p = c.bytes(kQueries * stride(round16(tokens)));
  s.scores = c.floats(kQueries * (round16(tokens) + 16));
  return s;
}

void Training::attend_item(int thread, const Step& step, int sequence, int kv_head) {
  const int64_t begin = batch_.starts[sequence], n = batch_.starts[sequence + 1] - begin, d = program_.head_dim, window = step.i[0];
  Carver carver{own(thread)};
  const AttendSpace s = attend_space(carver, n);
  const int64_t q_width = width(step.in[0]), kv_width = width(step.in[1]), heads = width(step.out[1]), group = heads / program_.kv_heads;
  const int64_t q_stride = stride(d), p_stride = stride(round16(n)), row = round16(n) + 16;
  const float* const k = value(step.in[1], begin) + kv_head * d;
  const float* const v = value(step.in[2], begin) + kv_head * d;
  for (int64_t tile = 0; tile < tiles(n); ++tile)
    packing_.rows(k + tile * 16 * kv_width, kv_width, int(std::min<int64_t>(16, n - tile * 16)), d, s.k + tile * tile_bytes(d));
  for (int64_t tile = 0; tile < tiles(d); ++tile)
    packing_.columns(v + tile * 16, kv_width, int(std::min<int64_t>(16, d - tile * 16)), n, s.v + tile * tile_bytes(n));
  const Matrix keys = matrix(n, d, s.k);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = 0; first < n; first += kQueries) {
      const int64_t queries = std::min<int64_t>(kQueries, n - first);
      const int64_t low = window ? std::max<int64_t>(0, first - window + 1) / 16 * 16 : 0, seen = round16(first + queries) - low;
      const float* const q = value(step.in[0], begin + first) + head * d;
      for (int64_t i = 0; i < queries; ++i) packing_.convert(q + i * q_width, d, padded(d), s.q + i * q_stride);
      product().multiply(keys, low / 16, tiles(first + queries), s.q, q_stride, queries, s.scores, row);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t own = first + i, from = window ? std::max<int64_t>(0, own - window + 1) : 0;
        float* const scores = s.scores + i * row + low;
        value(step.out[1], begin + own)[head] = kernels_.gradient.softmax(scores, seen, from - low, own + 1 - low, step.f[0], step.f[1]);
        packing_.convert(scores, seen, padded(seen), s.p + i * p_stride);
      }
      Matrix values = matrix(d, n, s.v);
      values.cols = seen, values.tiles += low * column_bytes();
      product().multiply(values, 0, tiles(d), s.p, p_stride, queries, value(step.out[0], begin + first) + head * d, q_width);
    }
}

Training::AttendGradSpace Training::attend_grad_space(Carver& c, int64_t tokens) const {
  const int64_t d = program_.head_dim;
  AttendGradSpace s;
  s.k = c.bytes(tiles(tokens) * tile_bytes(d));
  s.v = c.bytes(tiles(tokens) * tile_bytes(d));
  s.k_turned = c.bytes(tiles(d) * tile_bytes(tokens));
  s.q_turned = c.bytes(tiles(d) * tile_bytes(kGradQueries));
  s.do_turned = c.bytes(tiles(d) * tile_bytes(kGradQueries));
  s.x = c.bytes(kGradQueries * stride(std::max(d, round16(tokens))));
  s.p_turned = c.bytes(round16(tokens) * stride(kGradQueries));
  s.scores = c.floats(kGradQueries * (round16(tokens) + 16));
  s.dp = c.floats(kGradQueries * (round16(tokens) + 16));
  s.sums = c.floats(round16(tokens) * d);
  return s;
}

void Training::attend_grad_item(int thread, const Step& step, int sequence, int kv_head) {
  const int64_t begin = batch_.starts[sequence], n = batch_.starts[sequence + 1] - begin, d = program_.head_dim, window = step.i[0];
  Carver carver{own(thread)};
  const AttendGradSpace s = attend_grad_space(carver, n);
  const int64_t q_width = width(step.in[0]), kv_width = width(step.in[1]), heads = width(step.in[4]), group = heads / program_.kv_heads;
  const int64_t d_stride = stride(d), turned_stride = stride(kGradQueries), row = round16(n) + 16, p_stride = stride(std::max(d, round16(n)));
  const float* const k = value(step.in[1], begin) + kv_head * d;
  const float* const v = value(step.in[2], begin) + kv_head * d;
  float* const dk = value(step.out[1], begin) + kv_head * d;
  float* const dv = value(step.out[2], begin) + kv_head * d;
  for (int64_t tile = 0; tile < tiles(n); ++tile) {
    const int rows = int(std::min<int64_t>(16, n - tile * 16));
    packing_.rows(k + tile * 16 * kv_width, kv_width, rows, d, s.k + tile * tile_bytes(d));
    packing_.rows(v + tile * 16 * kv_width, kv_width, rows, d, s.v + tile * tile_bytes(d));
  }
  for (int64_t tile = 0; tile < tiles(d); ++tile)
    packing_.columns(k + tile * 16, kv_width, int(std::min<int64_t>(16, d - tile * 16)), n, s.k_turned + tile * tile_bytes(n));
  for (int64_t t = 0; t < n; ++t) {
    std::fill_n(dk + t * kv_width, d, 0.f);
    std::fill_n(dv + t * kv_width, d, 0.f);
  }
  const Matrix keys = matrix(n, d, s.k), values = matrix(n, d, s.v);

  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = 0; first < n; first += kGradQueries) {
      const int64_t queries = std::min<int64_t>(kGradQueries, n - first), last = first + queries;
      const int64_t low = window ? std::max<int64_t>(0, first - window + 1) / 16 * 16 : 0, seen = round16(last) - low;
      const float* const q = value(step.in[0], begin + first) + head * d;
      const float* const o = value(step.in[3], begin + first) + head * d;
      const float* const out_grad = value(step.in[5], begin + first) + head * d;
      float* const dq = value(step.out[0], begin + first) + head * d;

      // scores and dp of what is visible, then p and ds in their place
      const auto products = [&](const float* x, const Matrix& m, float* y) {
        for (int64_t i = 0; i < queries; ++i) packing_.convert(x + i * q_width, d, padded(d), s.x + i * d_stride);
        for (int64_t i = 0; i < queries; i += kQueries) {
          const int64_t part = std::min<int64_t>(kQueries, queries - i), from = window ? std::max<int64_t>(0, first + i - window + 1) : 0;
          product().multiply(m, from / 16, tiles(first + i + part), s.x + i * d_stride, d_stride, part, y + i * row, row);
        }
      };
      products(q, keys, s.scores);
      products(out_grad, values, s.dp);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t own = first + i, from = window ? std::max<int64_t>(0, own - window + 1) : 0;
        const float delta = kernels_.gradient.dot(out_grad + i * q_width, o + i * q_width, d);
        kernels_.gradient.softmax_grad(s.scores + i * row + low, s.dp + i * row + low, seen, from - low, own + 1 - low, step.f[0], step.f[1],
                                       value(step.in[4], begin + own)[head], delta);
      }
      // dq = ds k
      for (int64_t i = 0; i < queries; i += kQueries) {
        const int64_t part = std::min<int64_t>(kQueries, queries - i), from = window ? std::max<int64_t>(0, first + i - window + 1) / 16 * 16 : 0;
        Matrix m = matrix(d, n, s.k_turned);
        m.cols = round16(first + i + part) - from, m.tiles += from * column_bytes();
        for (int64_t r = i; r < i + part; ++r) packing_.convert(s.dp + r * row + from, m.cols, padded(m.cols), s.x + r * p_stride);
        product().multiply(m, 0, tiles(d), s.x + i * p_stride, p_stride, part, dq + i * q_width, q_width);
      }
      // dv += p^T do, dk += ds^T q: the queries are what is summed over
      const auto sum_queries = [&](const float* weights, const float* x, uint8_t* x_turned, float* out) {
        for (int64_t tile = 0; tile < tiles(d); ++tile)
          packing_.columns(x + tile * 16, q_width, int(std::min<int64_t>(16, d - tile * 16)), queries, x_turned + tile * tile_bytes(queries));
        const int64_t count = std::min(low + seen, n) - low;
        packing_.turn(weights + low, row, queries, count, s.p_turned, turned_stride, padded(queries));
        for (int64_t key = low; key < low + count; key += kQueries) {
          const int64_t part = std::min<int64_t>(kQueries, low + count - key), skipped = std::max<int64_t>(0, key - first) / 16 * 16;
          Matrix m = matrix(d, queries, x_turned);
          m.cols -= skipped, m.tiles += skipped * column_bytes();
          product().multiply(m, 0, tiles(d), s.p_turned + (key - low) * turned_stride + skipped * element_bytes(), turned_stride, part, s.sums, d);
          for (int64_t i = 0; i < part; ++i) kernels_.elementwise.add(s.sums + i * d, d, out + (key + i) * kv_width);
        }
      };
      sum_queries(s.scores, out_grad, s.do_turned, dv);
      sum_queries(s.dp, q, s.q_turned, dk);
    }
}

}  // namespace ckdist
