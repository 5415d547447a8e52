// The gradient of attention within packed sequences, computed from the saved log-sum-exp.
#include <cmath>

#include "runtime/steps/packed_attention.h"

namespace ckdist {
namespace {

struct AttendGrad : PackedAttention<ckdist_attend_grad_step> {
  static constexpr int kGradQueries = 128;  // queries of a block; sums over a block's queries are matrix products

  struct Space {
    // Tiles: k (tokens, key_width), v (tokens, value_width); x_transposed are (columns of x, tokens or queries).
    // ds: (kQueries, tokens), rows as activations.
    uint8_t *k, *v, *k_transposed, *q_transposed, *do_transposed, *p_transposed, *ds_transposed, *ds;
    // scores, dp: (kQueries, tokens). dq: (kQueries, key_width). dk, dv: (tokens, key_width or value_width).
    float *scores, *dp, *dq, *dk, *dv;
  };
  // One kv-head of one sequence.
  struct Item {
    int64_t number, kv_head, begin, n;  // begin: first token of the sequence; n: its tokens
    int64_t row, ds_stride;             // stride of scores in floats; stride of ds in bytes
    Space s;
    Matrix keys, values;
  };
  // Queries [first, first + queries) of a head. They see `seen` keys from key `low` on.
  struct Block {
    int64_t head, first, queries, low, seen;
    Operand q, o, d_out;
  };

  // Not a multiple of 4096 bytes, so that tiles do not share cache sets.
  static int64_t transposed_bytes(const Training& r) { return r.tile_bytes(kGradQueries) + 64; }
  static Space space(Carver& c, const Training& r, const Fields& step, int64_t tokens) {
    const int64_t keys = key_width_of(r, step), values = value_width_of(r, step);
    Space s;
    s.k = c.bytes(tiles_of(tokens) * r.tile_bytes(keys));
    s.v = c.bytes(tiles_of(tokens) * r.tile_bytes(values));
    s.k_transposed = c.bytes(tiles_of(keys) * r.tile_bytes(tokens));
    s.q_transposed = c.bytes(tiles_of(keys) * r.tile_bytes(kGradQueries));
    s.do_transposed = c.bytes(tiles_of(values) * r.tile_bytes(kGradQueries));
    s.p_transposed = c.bytes(tiles_of(tokens) * transposed_bytes(r));
    s.ds_transposed = c.bytes(tiles_of(tokens) * transposed_bytes(r));
    s.ds = c.bytes(kQueries * Training::stride(round16(tokens) + 16, r.scratch_bytes()));
    s.scores = c.floats(kQueries * (round16(tokens) + 16));
    s.dp = c.floats(kQueries * (round16(tokens) + 16));
    s.dq = c.floats(kQueries * round16(keys));
    s.dk = c.floats(round16(tokens) * round16(keys));
    s.dv = c.floats(round16(tokens) * round16(values));
    return s;
  }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    Carver c;
    space(c, r, step, r.program.max_tokens);
    return c.used;
  }

  // If sinks are trained: (tokens, heads), the dot product of the attention's result and its gradient.
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return step.sinks < 0 ? 0 : r.program.max_tokens * r.width(step.log_sum_exp) * 4;
  }
  float* delta(int64_t token) const { return reinterpret_cast<float*>(r.workspace()) + token * heads; }

  void run() {
    each_head([&](int64_t item) { kv_head_of(begin_item(item)); });
    if (step.sinks >= 0) parallel_for(heads, [&](int64_t head) { sum_sink(head); });
  }

  // For a sink p = exp(sink - log_sum_exp) and dp = 0. So d_sink = -sum over tokens of p * delta.
  void sum_sink(int64_t head) const {
    const float sink = r.parameter(step.sinks)[head];
    double sum = 0;
    for (int64_t t = 0; t < r.batch.tokens; ++t)
      sum -= double(std::exp(sink - r.floats(step.log_sum_exp, t)[head])) * delta(t)[head];
    r.gradient(step.sinks_gradient)[head] += float(sum);
  }

  Item begin_item(int64_t number) {
    const int64_t sequence = number / kv_heads, kv_head = number % kv_heads;
    const int64_t begin = r.batch.starts[sequence], n = r.batch.starts[sequence + 1] - begin;
    Carver c{r.memory(thread)};
    const Space s = space(c, r, step, n);
    const Operand k = key_head(step.k, begin, kv_head), v = value_head(step.v, begin, kv_head);
    fetch(k, n, key_width), fetch(v, n, value_width);
    pack_rows(k, n, key_width, s.k);
    pack_rows(v, n, value_width, s.v);
    pack_columns(k, n, key_width, s.k_transposed);
    std::fill_n(s.dk, n * round16(key_width), 0.f);
    std::fill_n(s.dv, n * round16(value_width), 0.f);
    return {number,
            kv_head,
            begin,
            n,
            round16(n) + 16,
            Training::stride(round16(n) + 16, r.scratch_bytes()),
            s,
            r.matrix(n, key_width, s.k),
            r.matrix(n, value_width, s.v)};
  }

  void kv_head_of(const Item& item) {
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head)
      for (int64_t first = 0; first < item.n; first += kGradQueries) {
        const int64_t queries = std::min<int64_t>(kGradQueries, item.n - first), low = first_seen(first) / 16 * 16;
        const Block block{head,
                          first,
                          queries,
                          low,
                          round16(first + queries) - low,
                          key_head(step.q, item.begin + first, head),
                          value_head(step.out, item.begin + first, head),
                          value_head(step.d_out, item.begin + first, head)};
        if (first == 0) {
          fetch_queries(item, head, 0);
          for (const int32_t of : {step.d_out, step.out}) fetch_values(item, head, of, 0);
        }
        for (int64_t i = 0; i < queries; i += kQueries) query_rows(item, block, i);
        sum_queries(item, block, item.s.p_transposed, block.d_out, value_width, item.s.do_transposed, item.s.dv);
        sum_queries(item, block, item.s.ds_transposed, block.q, key_width, item.s.q_transposed, item.s.dk);
      }
    for (int64_t t = 0; t < item.n; ++t) {
      r.store(step.dk, item.begin + t, item.kv_head * key_width, item.s.dk + t * round16(key_width), key_width);
      r.store(step.dv, item.begin + t, item.kv_head * value_width, item.s.dv + t * round16(value_width), value_width);
    }
  }

  void fetch_queries(const Item& item, int64_t head, int64_t at) const {
    fetch(key_head(step.q, item.begin + at, head), std::clamp<int64_t>(item.n - at, 0, kQueries), key_width);
  }
  void fetch_values(const Item& item, int64_t head, int32_t of, int64_t at) const {
    fetch(value_head(of, item.begin + at, head), std::clamp<int64_t>(item.n - at, 0, kQueries), value_width);
  }

  // Computes p, ds and their transposes, and dq, for kQueries queries from query i of the block on.
  void query_rows(const Item& item, const Block& b, int64_t i) {
    const Space& s = item.s;
    const int64_t part = std::min<int64_t>(kQueries, b.queries - i), next = b.first + i + part,
                  from = first_seen(b.first + i) / 16 * 16, end = round16(next), at = item.begin + b.first + i;
    fetch_queries(item, b.head, next);
    if (b.head % group == 0) fetch_next(item.number, b.first + i);
    r.product.multiply(item.keys, from / 16, end / 16, b.q.row(i), b.q.stride, part, s.scores, item.row, false);
    fetch_values(item, b.head, step.d_out, next);
    r.product.multiply(item.values, from / 16, end / 16, b.d_out.row(i), b.d_out.stride, part, s.dp, item.row, false);
    Query of[kQueries]{};
    for (int64_t t = 0; t < part; ++t) {
      const int64_t query = b.first + i + t;
      of[t] = {
          first_seen(query) - b.low, query + 1 - b.low, r.floats(step.log_sum_exp, at + t)[b.head],
          r.kernels.row.dot({b.d_out.row(i + t), r.narrow_values}, {b.o.row(i + t), r.narrow_values}, value_width)};
      if (step.sinks >= 0) delta(at + t)[b.head] = of[t].delta;
    }
    fetch_values(item, b.head, step.out, next);
    fetch_to_write(key_head(step.dk, at, item.kv_head), part, key_width);
    fetch_to_write(value_head(step.dv, at, item.kv_head), part, value_width);
    r.kernels.softmax.gradient(
        {s.scores + b.low, s.dp + b.low, item.row, end - b.low, kQueries, step.scale, step.soft_cap,
         r.tile_type == Type::bf16, s.ds, item.ds_stride, s.p_transposed + i * r.column_bytes(),
         s.ds_transposed + i * r.column_bytes(), transposed_bytes(r)},
        of);
    query_gradients(item, b, from, end, part, at);
  }

  // dq = ds k.
  void query_gradients(const Item& item, const Block& b, int64_t from, int64_t end, int64_t part, int64_t at) {
    const Space& s = item.s;
    const int64_t bytes = r.scratch_bytes(), d_row = round16(key_width);
    Matrix m = r.matrix(key_width, item.n, s.k_transposed);
    m.cols = end - from, m.tiles += from * r.column_bytes();
    fetch_to_write(key_head(step.dq, at, b.head), part, key_width);
    r.scratch_product.multiply(m, 0, tiles_of(key_width), s.ds + (from - b.low) * bytes, item.ds_stride, part, s.dq,
                               d_row, false);
    for (int64_t t = 0; t < part; ++t) r.store(step.dq, at + t, b.head * key_width, s.dq + t * d_row, key_width);
  }

  // dv += p^T do, dk += ds^T q: sums over the block's queries. Queries before a key do not see it and are skipped.
  void sum_queries(const Item& item, const Block& b, const uint8_t* weights, const Operand& x, int64_t d,
                   uint8_t* x_transposed, float* out) {
    const int64_t d_row = round16(d), weight_bytes = transposed_bytes(r);
    pack_columns(x, b.queries, d, x_transposed);
    for (int64_t key = b.low; key < std::min(b.low + b.seen, item.n); key += kTileRows) {
      const int64_t part = std::min<int64_t>(kTileRows, item.n - key), skipped = std::max<int64_t>(0, key - b.first);
      Matrix m = r.matrix(d, b.queries, x_transposed);
      m.cols -= skipped, m.tiles += skipped * r.column_bytes();
      r.product.outer(m, 0, tiles_of(d),
                      weights + (key - b.low) / kTileRows * weight_bytes + skipped * r.column_bytes(), weight_bytes,
                      part, out + key * d_row, d_row, true, nullptr);
    }
  }
};

const RegisteredKind<AttendGrad> kKind(ckdist_step_attend_grad);

}  // namespace
}  // namespace ckdist
