// Causal grouped-query attention within packed sequences, and its gradient from the saved log-sum-exp (Dao et al. 2022,
// arXiv:2205.14135). An item is one kv-head of one sequence with all query heads that share it, so nothing is written
// twice. All products are those of packed tiles; blocks of keys that no query of a block sees are left out.
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
    const int64_t sequence = item / program_.kv_heads;
    if (batch_.starts[sequence + 1] == batch_.starts[sequence]) return;
    gradient ? attend_grad_item(thread, step, item) : attend_item(thread, step, item);
  });
}

Training::AttendSpace Training::attend_space(Carver& c, int64_t tokens) const {
  const int64_t d = program_.head_dim;
  AttendSpace s;
  s.k = c.bytes(tiles(tokens) * tile_bytes(d));
  s.v = c.bytes(tiles(d) * tile_bytes(tokens));
  s.p = c.bytes(kQueries * stride(round16(tokens), scratch_bytes()));
  s.scores = c.floats(kQueries * (round16(tokens) + 16));
  s.sums = c.floats(kQueries * round16(d));
  return s;
}

// A head's part of some rows, a few lines each and far apart, comes to the cache while others are multiplied: what
// waits for one row after the other waits long. From memory to the L2 cache, or to the L1 cache where it is written
// next.
void Training::fetch(const Operand& x, int64_t rows) const {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < program_.head_dim * element_bytes(); at += 64) __builtin_prefetch(x.row(row) + at, 0, 2);
}
void Training::fetch_to_write(const Operand& x, int64_t rows) const {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < program_.head_dim * element_bytes(); at += 64) __builtin_prefetch(x.row(row) + at, 1);
}

// The same of keys and values [at, at + kQueries) of the item that this thread will have next, if all take as long.
void Training::fetch_next(const Step& step, int64_t item, int64_t at) const {
  const int64_t next = item + pool_.size(), sequence = next / program_.kv_heads;
  if (sequence + 1 >= int64_t(batch_.starts.size())) return;
  const int64_t rows = std::clamp<int64_t>(batch_.starts[sequence + 1] - batch_.starts[sequence] - at, 0, kQueries);
  for (const int of : {1, 2}) fetch(head_of(step.in[of], batch_.starts[sequence] + at, next % program_.kv_heads), rows);
}

// Rows of an operand as a matrix, and turned.
void Training::pack_rows(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const {
  for (int64_t tile = 0; tile < tiles(rows); ++tile)
    packing_.operand_rows(x.row(tile * 16), x.stride, int(std::min<int64_t>(16, rows - tile * 16)), cols,
                          to + tile * tile_bytes(cols));
}
void Training::pack_columns(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const {
  for (int64_t tile = 0; tile < tiles(cols); tile += 2)
    packing_.operand_columns(x.at + tile * 16 * element_bytes(), x.stride, int(std::min<int64_t>(32, cols - tile * 16)),
                             rows, to + tile * tile_bytes(rows), tile_bytes(rows));
}

void Training::attend_item(int thread, const Step& step, int64_t item) {
  const int64_t sequence = item / program_.kv_heads, kv_head = item % program_.kv_heads;
  const int64_t begin = batch_.starts[sequence], n = batch_.starts[sequence + 1] - begin, d = program_.head_dim,
                window = step.i[0];
  Carver carver{own(thread)};
  const AttendSpace s = attend_space(carver, n);
  const int64_t heads = width(step.out[1]), group = heads / program_.kv_heads,
                p_stride = stride(round16(n), scratch_bytes()), row = round16(n) + 16;
  const Operand k = head_of(step.in[1], begin, kv_head), v = head_of(step.in[2], begin, kv_head);
  fetch(k, n), fetch(v, n);
  pack_rows(k, n, d, s.k);
  pack_columns(v, n, d, s.v);
  const Matrix keys = matrix(n, d, s.k);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = 0; first < n; first += kQueries) {
      const int64_t queries = std::min<int64_t>(kQueries, n - first);
      const int64_t low = window ? std::max<int64_t>(0, first - window + 1) / 16 * 16 : 0,
                    seen = round16(first + queries) - low;
      const Operand q = head_of(step.in[0], begin + first, head);
      if (first == 0) fetch(q, queries);
      fetch(head_of(step.in[0], begin + first + queries, head), std::min<int64_t>(kQueries, n - first - queries));
      fetch_to_write(head_of(step.out[0], begin + first, head), queries);
      if (head == kv_head * group) fetch_next(step, item, first);
      product_.multiply(keys, low / 16, tiles(first + queries), q.at, q.stride, queries, s.scores, row, false);
      float inverse[kQueries];
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t own = first + i, from = window ? std::max<int64_t>(0, own - window + 1) : 0;
        const float* const scores = s.scores + i * row + low;
        const Row p{s.p + i * p_stride, type_ == Type::bf16};
        floats(step.out[1], begin + own)[head] =
            kernels_.softmax.row(scores, seen, from - low, own + 1 - low, step.f[0], step.f[1], inverse + i, p);
        std::fill_n(p.at + seen * scratch_bytes(), (padded(seen) - seen) * scratch_bytes(), uint8_t{0});
      }
      Matrix values = matrix(d, n, s.v);
      values.cols = seen, values.tiles += low * column_bytes();
      scratch_product_.multiply(values, 0, tiles(d), s.p, p_stride, queries, s.sums, round16(d), false);
      for (int64_t i = 0; i < queries; ++i) {
        const Operand o = head_of(step.out[0], begin + first + i, head);
        kernels_.row.scale({reinterpret_cast<uint8_t*>(s.sums + i * round16(d)), false}, inverse[i], d,
                           {o.at, narrow(step.out[0])});
        if (head + 1 == heads) pad(step.out[0], begin + first + i);
      }
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
  s.p_turned = c.bytes(tiles(tokens) * turned_bytes());
  s.ds_turned = c.bytes(tiles(tokens) * turned_bytes());
  s.ds = c.bytes(kQueries * stride(round16(tokens) + 16, scratch_bytes()));
  s.scores = c.floats(kQueries * (round16(tokens) + 16));
  s.dp = c.floats(kQueries * (round16(tokens) + 16));
  s.dq = c.floats(kQueries * round16(d));
  s.dk = c.floats(round16(tokens) * round16(d));
  s.dv = c.floats(round16(tokens) * round16(d));
  return s;
}

void Training::attend_grad_item(int thread, const Step& step, int64_t item) {
  const int64_t sequence = item / program_.kv_heads, kv_head = item % program_.kv_heads;
  const int64_t begin = batch_.starts[sequence], n = batch_.starts[sequence + 1] - begin, d = program_.head_dim,
                window = step.i[0];
  Carver carver{own(thread)};
  const AttendGradSpace s = attend_grad_space(carver, n);
  const int64_t heads = width(step.in[4]), group = heads / program_.kv_heads, d_row = round16(d);
  const int64_t row = round16(n) + 16, ds_stride = stride(round16(n) + 16, scratch_bytes());
  const Operand k = head_of(step.in[1], begin, kv_head), v = head_of(step.in[2], begin, kv_head);
  fetch(k, n), fetch(v, n);
  pack_rows(k, n, d, s.k);
  pack_rows(v, n, d, s.v);
  pack_columns(k, n, d, s.k_turned);
  std::fill_n(s.dk, n * d_row, 0.f);
  std::fill_n(s.dv, n * d_row, 0.f);
  const Matrix keys = matrix(n, d, s.k), values = matrix(n, d, s.v);

  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = 0; first < n; first += kGradQueries) {
      const int64_t queries = std::min<int64_t>(kGradQueries, n - first), last = first + queries;
      const int64_t low = window ? std::max<int64_t>(0, first - window + 1) / 16 * 16 : 0, seen = round16(last) - low;
      const Operand q = head_of(step.in[0], begin + first, head), o = head_of(step.in[3], begin + first, head);
      const Operand out_grad = head_of(step.in[5], begin + first, head);
      const auto fetch_part = [&](int of, int64_t at) {
        fetch(head_of(step.in[of], begin + at, head), std::clamp<int64_t>(n - at, 0, kQueries));
      };
      if (first == 0) fetch_part(0, 0), fetch_part(5, 0), fetch_part(3, 0);

      for (int64_t i = 0; i < queries; i += kQueries) {
        const int64_t part = std::min<int64_t>(kQueries, queries - i),
                      from = window ? std::max<int64_t>(0, first + i - window + 1) / 16 * 16 : 0;
        const int64_t end = round16(first + i + part);
        fetch_part(0, first + i + part);
        if (head == kv_head * group) fetch_next(step, item, first + i);
        product_.multiply(keys, from / 16, end / 16, q.row(i), q.stride, part, s.scores, row, false);
        fetch_part(5, first + i + part);
        product_.multiply(values, from / 16, end / 16, out_grad.row(i), out_grad.stride, part, s.dp, row, false);
        Query of[kQueries]{};
        for (int64_t t = 0; t < part; ++t) {
          const int64_t own = first + i + t;
          of[t] = {(window ? std::max<int64_t>(0, own - window + 1) : 0) - low, own + 1 - low,
                   floats(step.in[4], begin + own)[head],
                   kernels_.row.dot({out_grad.row(i + t), narrow_}, {o.row(i + t), narrow_}, d)};
        }
        fetch_part(3, first + i + part);
        for (const int of : {1, 2}) fetch_to_write(head_of(step.out[of], begin + first + i, kv_head), part);
        kernels_.softmax.gradient(
            {s.scores + low, s.dp + low, row, end - low, kQueries, step.f[0], step.f[1], type_ == Type::bf16, s.ds,
             ds_stride, s.p_turned + i * column_bytes(), s.ds_turned + i * column_bytes(), turned_bytes()},
            of);
        // dq = ds k. A product may read 32 columns at a time.
        if ((end - from) % 32)
          for (int64_t t = 0; t < part; ++t)
            std::fill_n(s.ds + t * ds_stride + (end - low) * scratch_bytes(), 16 * scratch_bytes(), uint8_t{0});
        Matrix m = matrix(d, n, s.k_turned);
        m.cols = end - from, m.tiles += from * column_bytes();
        fetch_to_write(head_of(step.out[0], begin + first + i, head), part);
        scratch_product_.multiply(m, 0, tiles(d), s.ds + (from - low) * scratch_bytes(), ds_stride, part, s.dq, d_row,
                                  false);
        for (int64_t t = 0; t < part; ++t) store(step.out[0], begin + first + i + t, head * d, s.dq + t * d_row, d);
      }
      // dv += p^T do, dk += ds^T q: the queries are what is summed over. Those before a key do not see it.
      const auto sum_queries = [&](const uint8_t* weights, const Operand& x, uint8_t* x_turned, float* out) {
        pack_columns(x, queries, d, x_turned);
        for (int64_t key = low; key < std::min(low + seen, n); key += kTileRows) {
          const int64_t part = std::min<int64_t>(kTileRows, n - key), skipped = std::max<int64_t>(0, key - first);
          Matrix m = matrix(d, queries, x_turned);
          m.cols -= skipped, m.tiles += skipped * column_bytes();
          product_.outer(m, 0, tiles(d), weights + (key - low) / kTileRows * turned_bytes() + skipped * column_bytes(),
                         turned_bytes(), part, out + key * d_row, d_row, true, nullptr);
        }
      };
      sum_queries(s.p_turned, out_grad, s.do_turned, s.dv);
      sum_queries(s.ds_turned, q, s.q_turned, s.dk);
    }
  for (int64_t t = 0; t < n; ++t) {
    store(step.out[1], begin + t, kv_head * d, s.dk + t * d_row, d);
    store(step.out[2], begin + t, kv_head * d, s.dv + t * d_row, d);
  }
}

}  // namespace ckdist
