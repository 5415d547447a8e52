// The gradient of attention within packed sequences, computed from the saved log-sum-exp.
#include <cmath>

#include "runtime/steps/packed_attention.h"

namespace ckdist {
namespace {

struct AttendGrad : PackedAttention<ckdist_attend_grad_step> {
  static constexpr int kGradQueries = 128;  // queries of a block; sums over a block's queries are matrix products
  static constexpr int64_t kKeys = 4096;    // keys of a block: its probabilities and their gradients fit the L2 cache

  struct Space {
    // Tiles: k (tokens, key_width), v (tokens, value_width); x_transposed are (columns of x, tokens or queries), of p
    // and ds (keys, queries) of a block. ds: (kQueries, keys), rows as activations.
    uint8_t *k, *v, *k_transposed, *q_transposed, *do_transposed, *p_transposed, *ds_transposed, *ds;
    // scores, dp: (kQueries, keys). dq: (kGradQueries, key_width). dk, dv: (tokens, key_width or value_width).
    float *scores, *dp, *dq, *dk, *dv;
  };
  // Sums over queries are computed for keys [first_key, end_key), and for all queries or none.
  struct Item : AttentionItem {
    bool has_sums, has_queries;  // dk and dv; dq
    int64_t first_key, end_key;
    int64_t row, ds_stride;  // stride of scores in floats; stride of ds in bytes
    Space s;
    Matrix keys, values;
  };
  // Queries [first, first + queries) of a head, in rows from `token` on. They see `seen` keys from key `low` on.
  struct Block {
    int64_t head, first, queries, token, low, seen;
    const OwnQueries& own;
    Operand q, o, d_out;
    int64_t end() const { return low + seen; }
  };
  // Keys [begin, end) of a block of queries, and its queries.
  struct Keys {
    int64_t begin, end;
    bool is_first;
    Query* queries;
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
    const int64_t part = std::min(round16(tokens), kKeys);
    s.p_transposed = c.bytes(tiles_of(part) * transposed_bytes(r));
    s.ds_transposed = c.bytes(tiles_of(part) * transposed_bytes(r));
    s.ds = c.bytes(kQueries * Training::stride(part + 16, r.scratch_bytes()));
    s.scores = c.floats(kQueries * (part + 16));
    s.dp = c.floats(kQueries * (part + 16));
    s.dq = c.floats(kGradQueries * round16(keys));
    s.dk = c.floats(round16(tokens) * round16(keys));
    s.dv = c.floats(round16(tokens) * round16(values));
    return s;
  }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) { space(c, r, step, r.most_keys()), c.bytes(copied_bytes(r, step)); });
  }

  // In the workspace. delta: if sinks are trained, (tokens, heads), the dot product of the attention's result and its
  // gradient. all, own: for divided batches, gradients of keys and values of all ranks by this rank's queries, and the
  // sums for this rank's tokens.
  struct Shared {
    uint8_t* gathered;
    float *delta, *all, *own;
  };
  static Shared shared(Carver& c, const Training& r, const Fields& step) {
    const int64_t floats = r.sequence_ranks() == 1 ? 0 : row_elements(r, step);
    return {c.bytes(gathered_bytes(r, step)),
            c.floats(step.sinks < 0 ? 0 : r.program.max_tokens * r.width(step.log_sum_exp)),
            c.floats(r.most_keys() * floats), c.floats(r.program.max_tokens * floats)};
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) { shared(c, r, step); });
  }
  Shared shared() const {
    Carver c{r.workspace()};
    return shared(c, r, step);
  }
  float* delta(int64_t token) const { return shared().delta + token * heads; }

  void run() {
    if (is_divided()) begin_divided();
    // With too few items for all threads, parts of them compute dk and dv of some keys, then dq of some queries. Scores
    // are computed twice, and no two threads write the same memory.
    const int64_t parts = this->parts();
    each_head(parts, [&](const AttentionItem& item) { kv_head_of(begin_item(item, parts, true, parts == 1)); });
    if (parts > 1)
      each_head(parts, [&](const AttentionItem& item) {
        if (const AttentionItem own = queries_of_part(item, parts); own.n) kv_head_of(begin_item(own, 1, false, true));
      });
    if (is_divided()) end_divided();
    if (step.sinks >= 0) parallel_for(heads, [&](int64_t head) { sum_sink(head); });
  }

  void begin_divided() {
    float* const all = shared().all;
    const int64_t floats = row_elements();
    parallel_for(r.sequence_ranks() * tiles_of(r.batch.tokens), [&](int64_t item) {
      const int64_t last = std::min((item + 1) * 16, r.sequence_ranks() * r.batch.tokens);
      std::fill(all + item * 16 * floats, all + std::max(last, item * 16) * floats, 0.f);
    });
    gather_keys();
  }
  void end_divided() {
    const Shared s = shared();
    const int64_t floats = row_elements(), keys = kv_heads * key_width;
    r.meet(thread, index, true, [&](Idle) { r.scatter_sequence(s.all, r.batch.tokens * floats, s.own); });
    each_token([&](int64_t t) {
      r.store(step.dk, t, 0, s.own + t * floats, keys);
      r.store(step.dv, t, 0, s.own + t * floats + keys, floats - keys);
    });
  }

  // For a sink p = exp(sink - log_sum_exp) and dp = 0. So d_sink = -sum over tokens of p * delta.
  void sum_sink(int64_t head) const {
    const float sink = r.parameter(step.sinks)[head];
    double sum = 0;
    for (int64_t t = 0; t < r.batch.tokens; ++t)
      sum -= double(std::exp(sink - r.floats(step.log_sum_exp, t)[head])) * delta(t)[head];
    r.gradient(step.sinks_gradient)[head] += float(sum);
  }

  Item begin_item(const AttentionItem& item, int64_t parts, bool has_sums, bool has_queries) {
    const int64_t n = item.n, tiles = tiles_of(n), first_key = has_sums ? 16 * (tiles * item.part / parts) : 0,
                  end_key = has_sums ? 16 * (tiles * (item.part + 1) / parts) : round16(n);
    Carver c{r.memory(thread)};
    const Space s = space(c, r, step, n);
    copied = c.bytes(copied_bytes(r, step));
    if (!is_divided()) fetch(own_rows(item, false), n, key_width), fetch(own_rows(item, true), n, value_width);
    pack_keys(item, false, s.k);
    pack_keys(item, true, s.v);
    pack_keys_transposed(item, false, s.k_transposed);
    for (int64_t t = first_key; t < std::min(n, end_key) && has_sums; ++t) {
      std::fill_n(s.dk + t * round16(key_width), round16(key_width), 0.f);
      std::fill_n(s.dv + t * round16(value_width), round16(value_width), 0.f);
    }
    const int64_t part = std::min(round16(n), kKeys);
    const int64_t ds_stride = Training::stride(part + 16, r.scratch_bytes());
    const Matrix keys = r.matrix(n, key_width, s.k), values = r.matrix(n, value_width, s.v);
    return {item, has_sums, has_queries, first_key, end_key, part + 16, ds_stride, s, keys, values};
  }

  void kv_head_of(const Item& item) {
    for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head)
      for (const OwnQueries& own : item.queries)
        for (int64_t first = own.first; first < own.end; first += kGradQueries) block_of(item, head, own, first);
    float* const all = shared().all;
    const int64_t keys = item.kv_head * key_width, values = item.kv_head * value_width;
    for (int64_t t = item.first_key; t < std::min(item.n, item.end_key) && item.has_sums; ++t) {
      const float *dk = item.s.dk + t * round16(key_width), *dv = item.s.dv + t * round16(value_width);
      if (is_divided()) {
        float* const row = all + row_of(item.begin + t) * row_elements();
        std::copy_n(dk, key_width, row + keys), std::copy_n(dv, value_width, row + kv_heads * key_width + values);
      } else {
        r.store(step.dk, item.begin + t, keys, dk, key_width),
            r.store(step.dv, item.begin + t, values, dv, value_width);
      }
    }
  }

  void block_of(const Item& item, int64_t head, const OwnQueries& own, int64_t first) {
    const int64_t queries = std::min<int64_t>(kGradQueries, own.end - first), low = first_seen(first) / 16 * 16,
                  token = own.token + first - own.first;
    const Operand q = key_head(step.q, token, head), o = value_head(step.out, token, head),
                  d_out = value_head(step.d_out, token, head);
    const Block block{head, first, queries, token, low, round16(first + queries) - low, own, q, o, d_out};
    if (first == own.first) {
      fetch_heads(block, step.q, key_width, first);
      for (const int32_t of : {step.d_out, step.out}) fetch_heads(block, of, value_width, first);
    }
    const Space& s = item.s;
    pack_columns(block.d_out, queries, value_width, s.do_transposed);
    pack_columns(block.q, queries, key_width, s.q_transposed);
    std::fill_n(s.dq, queries * round16(key_width), 0.f);
    Query of[kGradQueries]{};
    bool is_first = true;
    for (int64_t key = low; key < block.end(); key += kKeys) {
      const Keys keys{std::max(key, item.first_key), std::min({key + kKeys, block.end(), item.end_key}), is_first, of};
      if (keys.begin >= keys.end) continue;
      is_first = false;
      for (int64_t i = 0; i < queries; i += kQueries) query_rows(item, block, i, keys);
      if (!item.has_sums) continue;
      sum_queries(item, block, keys, s.p_transposed, value_width, s.do_transposed, s.dv);
      sum_queries(item, block, keys, s.ds_transposed, key_width, s.q_transposed, s.dk);
    }
    for (int64_t t = 0; t < queries && item.has_queries; ++t)
      r.store(step.dq, token + t, head * key_width, s.dq + t * round16(key_width), key_width);
  }

  void fetch_heads(const Block& b, int32_t of, int64_t width, int64_t at) const {
    fetch(r.head_of(of, b.token + at - b.first, b.head, width), std::clamp<int64_t>(b.own.end - at, 0, kQueries),
          width);
  }

  // Rows of a packed matrix from `first` on, a multiple of 16.
  static Matrix rows_from(Matrix m, int64_t first) {
    m.rows -= first, m.tiles += first / kTileRows * m.tile_bytes;
    return m;
  }

  // Computes p, ds and their transposes, and adds to dq, for kQueries queries from query i of the block on.
  void query_rows(const Item& item, const Block& b, int64_t i, const Keys& keys) {
    const Space& s = item.s;
    const int64_t part = std::min<int64_t>(kQueries, b.queries - i), next = b.first + i + part, at = b.token + i,
                  from = std::max(first_seen(b.first + i) / 16 * 16, keys.begin),
                  end = std::min(round16(next), keys.end);
    const bool is_first = keys.is_first;
    if (end <= keys.begin) return;  // they see none of the keys
    if (is_first) {
      fetch_heads(b, step.q, key_width, next);
      if (b.head % group == 0) fetch_next(item.number, b.first + i);
    }
    const int64_t first_tile = (from - keys.begin) / 16, end_tile = (end - keys.begin) / 16;
    if (from < end)
      r.product.multiply(rows_from(item.keys, keys.begin), first_tile, end_tile, b.q.row(i), b.q.stride, part, s.scores,
                         item.row, false);
    if (is_first) fetch_heads(b, step.d_out, value_width, next);
    if (from < end)
      r.product.multiply(rows_from(item.values, keys.begin), first_tile, end_tile, b.d_out.row(i), b.d_out.stride, part,
                         s.dp, item.row, false);
    if (is_first) {
      begin_queries(b, i, part, keys.queries + i);
      fetch_heads(b, step.out, value_width, next);
      fetch_to_write(key_head(step.dk, at, item.kv_head), part, key_width);
      fetch_to_write(value_head(step.dv, at, item.kv_head), part, value_width);
    }
    Query of[kQueries]{};
    for (int64_t t = 0; t < part; ++t) {
      of[t] = keys.queries[i + t];
      of[t].first = std::max<int64_t>(of[t].first - keys.begin, 0);
      of[t].last = std::min(of[t].last - keys.begin, end - keys.begin);
      if (of[t].first >= of[t].last) of[t].first = of[t].last = 0;
    }
    r.kernels.softmax.gradient({s.scores, s.dp, item.row, end - keys.begin, kQueries, step.scale, step.soft_cap,
                                r.tile_type == Type::bf16, s.ds, item.ds_stride, s.p_transposed + i * r.column_bytes(),
                                s.ds_transposed + i * r.column_bytes(), transposed_bytes(r)},
                               of);
    if (from < end && item.has_queries) query_gradients(item, b, keys, i, from, end);
  }

  // The keys that each query sees, its log-sum-exp, and the dot product of its result and the gradient.
  void begin_queries(const Block& b, int64_t i, int64_t part, Query* of) const {
    for (int64_t t = 0; t < part; ++t) {
      const int64_t query = b.first + i + t, token = b.token + i + t;
      of[t] = {
          first_seen(query), query + 1, r.floats(step.log_sum_exp, token)[b.head],
          r.kernels.row.dot({b.d_out.row(i + t), r.narrow_values}, {b.o.row(i + t), r.narrow_values}, value_width)};
      if (step.sinks >= 0) delta(token)[b.head] = of[t].delta;
    }
  }

  // dq += ds k.
  void query_gradients(const Item& item, const Block& b, const Keys& keys, int64_t i, int64_t from, int64_t end) {
    const Space& s = item.s;
    const int64_t part = std::min<int64_t>(kQueries, b.queries - i), d_row = round16(key_width);
    Matrix m = r.matrix(key_width, item.n, s.k_transposed);
    m.cols = end - from, m.tiles += from * r.column_bytes();
    fetch_to_write(key_head(step.dq, b.token + i, b.head), part, key_width);
    r.scratch_product.multiply(m, 0, tiles_of(key_width), s.ds + (from - keys.begin) * r.scratch_bytes(),
                               item.ds_stride, part, s.dq + i * d_row, d_row, true);
  }

  // dv += p^T do, dk += ds^T q: sums over the block's queries. Queries before a key do not see it and are skipped, as
  // far as `query_rows` has written nothing for them.
  void sum_queries(const Item& item, const Block& b, const Keys& keys, const uint8_t* weights, int64_t d,
                   const uint8_t* x_transposed, float* out) {
    const int64_t d_row = round16(d), weight_bytes = transposed_bytes(r);
    const int64_t end = std::min(keys.end, item.n);
    // A tile of keys has the same queries for any division of the keys.
    const auto skipped = [&](int64_t key) {
      return std::max<int64_t>(0, key - round16(b.first)) / kQueries * kQueries;
    };
    for (int64_t key = keys.begin, part = 0; key < end; key += part) {
      const int64_t first = skipped(key);
      part = std::min<int64_t>((skipped(key + kTileRows) == first ? 2 : 1) * kTileRows, end - key);
      Matrix m = r.matrix(d, b.queries, x_transposed);
      m.cols -= first, m.tiles += first * r.column_bytes();
      r.product.outer(m, 0, tiles_of(d),
                      weights + (key - keys.begin) / kTileRows * weight_bytes + first * r.column_bytes(), weight_bytes,
                      part, out + key * d_row, d_row, true, nullptr);
    }
  }
};

const RegisteredKind<AttendGrad> kAttendGrad(ckdist_step_attend_grad);

}  // namespace
}  // namespace ckdist
