// The gradient of attention within packed sequences, from the saved log-sum-exp.
#include "runtime/steps/packed_attention.h"

namespace ckdist {
namespace {

struct AttendGrad : PackedAttention<ckdist_attend_grad_step> {
  static constexpr int kGradQueries = 128;  // of a block whose sums over queries are products

  struct Space {
    uint8_t *k, *v, *k_transposed, *q_transposed, *do_transposed, *p_transposed, *ds_transposed, *ds;
    float *scores, *dp, *dq, *dk, *dv;
  };
  // One kv-head of one sequence.
  struct Item {
    int64_t number, kv_head, begin, n, d;  // begin: its first token, n: its tokens, d: a head's elements
    int64_t row, ds_stride;                // floats of a row of scores; bytes of one of ds
    Space s;
    Matrix keys, values;
  };
  // Queries [first, first + queries) of a head, which see keys from `low` on, `seen` of them.
  struct Block {
    int64_t head, first, queries, low, seen;
    Operand q, o, d_out;
  };

  // No multiple of 4096 bytes: tiles do not share sets of the caches.
  static int64_t transposed_bytes(const Training& r) { return r.tile_bytes(kGradQueries) + 64; }
  static Space space(Carver& c, const Training& r, int64_t tokens) {
    const int64_t d = r.program.head_dim;
    Space s;
    s.k = c.bytes(tiles_of(tokens) * r.tile_bytes(d));
    s.v = c.bytes(tiles_of(tokens) * r.tile_bytes(d));
    s.k_transposed = c.bytes(tiles_of(d) * r.tile_bytes(tokens));
    s.q_transposed = c.bytes(tiles_of(d) * r.tile_bytes(kGradQueries));
    s.do_transposed = c.bytes(tiles_of(d) * r.tile_bytes(kGradQueries));
    s.p_transposed = c.bytes(tiles_of(tokens) * transposed_bytes(r));
    s.ds_transposed = c.bytes(tiles_of(tokens) * transposed_bytes(r));
    s.ds = c.bytes(kQueries * Training::stride(round16(tokens) + 16, r.scratch_bytes()));
    s.scores = c.floats(kQueries * (round16(tokens) + 16));
    s.dp = c.floats(kQueries * (round16(tokens) + 16));
    s.dq = c.floats(kQueries * round16(d));
    s.dk = c.floats(round16(tokens) * round16(d));
    s.dv = c.floats(round16(tokens) * round16(d));
    return s;
  }
  static int64_t thread_bytes(const Training& r, const Fields&) {
    Carver c;
    space(c, r, r.program.max_tokens);
    return c.used;
  }

  void run() {
    each_head([&](int64_t item) { kv_head(begin_item(item)); });
  }

  Item begin_item(int64_t number) {
    const int64_t sequence = number / r.program.kv_heads, kv_head = number % r.program.kv_heads;
    const int64_t begin = r.batch.starts[sequence], n = r.batch.starts[sequence + 1] - begin, d = r.program.head_dim;
    Carver c{r.memory(thread)};
    const Space s = space(c, r, n);
    const Operand k = r.head_of(step.k, begin, kv_head), v = r.head_of(step.v, begin, kv_head);
    fetch(k, n), fetch(v, n);
    pack_rows(k, n, d, s.k);
    pack_rows(v, n, d, s.v);
    pack_columns(k, n, d, s.k_transposed);
    std::fill_n(s.dk, n * round16(d), 0.f);
    std::fill_n(s.dv, n * round16(d), 0.f);
    return {number,
            kv_head,
            begin,
            n,
            d,
            round16(n) + 16,
            Training::stride(round16(n) + 16, r.scratch_bytes()),
            s,
            r.matrix(n, d, s.k),
            r.matrix(n, d, s.v)};
  }

  void kv_head(const Item& item) {
    const int64_t group = r.width(step.log_sum_exp) / r.program.kv_heads, d_row = round16(item.d);
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head)
      for (int64_t first = 0; first < item.n; first += kGradQueries) {
        const int64_t queries = std::min<int64_t>(kGradQueries, item.n - first), low = first_seen(first) / 16 * 16;
        const Block block{head,
                          first,
                          queries,
                          low,
                          round16(first + queries) - low,
                          r.head_of(step.q, item.begin + first, head),
                          r.head_of(step.out, item.begin + first, head),
                          r.head_of(step.d_out, item.begin + first, head)};
        if (first == 0)
          for (const int32_t of : {step.q, step.d_out, step.out}) fetch_part(item, head, of, 0);
        for (int64_t i = 0; i < queries; i += kQueries) query_rows(item, block, i);
        sum_queries(item, block, item.s.p_transposed, block.d_out, item.s.do_transposed, item.s.dv);
        sum_queries(item, block, item.s.ds_transposed, block.q, item.s.q_transposed, item.s.dk);
      }
    for (int64_t t = 0; t < item.n; ++t) {
      r.store(step.dk, item.begin + t, item.kv_head * item.d, item.s.dk + t * d_row, item.d);
      r.store(step.dv, item.begin + t, item.kv_head * item.d, item.s.dv + t * d_row, item.d);
    }
  }

  void fetch_part(const Item& item, int64_t head, int32_t of, int64_t at) const {
    fetch(r.head_of(of, item.begin + at, head), std::clamp<int64_t>(item.n - at, 0, kQueries));
  }

  // Of kQueries queries from the block's i-th on: p and ds, transposed and not, and dq.
  void query_rows(const Item& item, const Block& b, int64_t i) {
    const Space& s = item.s;
    const int64_t part = std::min<int64_t>(kQueries, b.queries - i), next = b.first + i + part,
                  from = first_seen(b.first + i) / 16 * 16, end = round16(next), at = item.begin + b.first + i;
    fetch_part(item, b.head, step.q, next);
    if (b.head % (r.width(step.log_sum_exp) / r.program.kv_heads) == 0) fetch_next(item.number, b.first + i);
    r.product.multiply(item.keys, from / 16, end / 16, b.q.row(i), b.q.stride, part, s.scores, item.row, false);
    fetch_part(item, b.head, step.d_out, next);
    r.product.multiply(item.values, from / 16, end / 16, b.d_out.row(i), b.d_out.stride, part, s.dp, item.row, false);
    Query of[kQueries]{};
    for (int64_t t = 0; t < part; ++t) {
      const int64_t query = b.first + i + t;
      of[t] = {first_seen(query) - b.low, query + 1 - b.low, r.floats(step.log_sum_exp, at + t)[b.head],
               r.kernels.row.dot({b.d_out.row(i + t), r.narrow_values}, {b.o.row(i + t), r.narrow_values}, item.d)};
    }
    fetch_part(item, b.head, step.out, next);
    for (const int32_t to : {step.dk, step.dv}) fetch_to_write(r.head_of(to, at, item.kv_head), part);
    r.kernels.softmax.gradient(
        {s.scores + b.low, s.dp + b.low, item.row, end - b.low, kQueries, step.scale, step.soft_cap,
         r.tile_type == Type::bf16, s.ds, item.ds_stride, s.p_transposed + i * r.column_bytes(),
         s.ds_transposed + i * r.column_bytes(), transposed_bytes(r)},
        of);
    query_gradients(item, b, from, end, part, at);
  }

  // dq = ds k. A product may read 32 columns at a time.
  void query_gradients(const Item& item, const Block& b, int64_t from, int64_t end, int64_t part, int64_t at) {
    const Space& s = item.s;
    const int64_t bytes = r.scratch_bytes(), d_row = round16(item.d);
    if ((end - from) % 32)
      for (int64_t t = 0; t < part; ++t)
        std::fill_n(s.ds + t * item.ds_stride + (end - b.low) * bytes, 16 * bytes, uint8_t{0});
    Matrix m = r.matrix(item.d, item.n, s.k_transposed);
    m.cols = end - from, m.tiles += from * r.column_bytes();
    fetch_to_write(r.head_of(step.dq, at, b.head), part);
    r.scratch_product.multiply(m, 0, tiles_of(item.d), s.ds + (from - b.low) * bytes, item.ds_stride, part, s.dq, d_row,
                               false);
    for (int64_t t = 0; t < part; ++t) r.store(step.dq, at + t, b.head * item.d, s.dq + t * d_row, item.d);
  }

  // dv += p^T do, dk += ds^T q: the queries are what is summed over. Those before a key do not see it.
  void sum_queries(const Item& item, const Block& b, const uint8_t* weights, const Operand& x, uint8_t* x_transposed,
                   float* out) {
    const int64_t d_row = round16(item.d), weight_bytes = transposed_bytes(r);
    pack_columns(x, b.queries, item.d, x_transposed);
    for (int64_t key = b.low; key < std::min(b.low + b.seen, item.n); key += kTileRows) {
      const int64_t part = std::min<int64_t>(kTileRows, item.n - key), skipped = std::max<int64_t>(0, key - b.first);
      Matrix m = r.matrix(item.d, b.queries, x_transposed);
      m.cols -= skipped, m.tiles += skipped * r.column_bytes();
      r.product.outer(m, 0, tiles_of(item.d),
                      weights + (key - b.low) / kTileRows * weight_bytes + skipped * r.column_bytes(), weight_bytes,
                      part, out + key * d_row, d_row, true, nullptr);
    }
  }
};

const RegisteredKind<AttendGrad> kKind(ckdist_step_attend_grad);

}  // namespace
}  // namespace ckdist
