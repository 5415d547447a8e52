// Causal grouped-query attention within packed sequences.
#include "runtime/scalars.h"
#include "runtime/steps/packed_attention.h"

namespace ckdist {
namespace {

struct AttendPacked : PackedAttention<ckdist_attend_packed_step> {
  struct Space {
    // k: tiles (tokens, key_width). v: tiles (value_width, tokens). p: (kQueries, tokens).
    uint8_t *k, *v, *p;
    float *scores, *sums;  // (kQueries, tokens), (kQueries, value_width)
  };
  static Space space(Carver& c, const Training& r, const Fields& step, int64_t tokens) {
    const int64_t values = value_width_of(r, step);
    return {c.bytes(tiles_of(tokens) * r.tile_bytes(key_width_of(r, step))),
            c.bytes(tiles_of(values) * r.tile_bytes(tokens)),
            c.bytes(kQueries * Training::stride(round16(tokens), r.scratch_bytes())),
            c.floats(kQueries * (round16(tokens) + 16)), c.floats(kQueries * round16(values))};
  }

  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) { space(c, r, step, r.most_keys()), c.bytes(copied_bytes(r, step)); });
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) { return gathered_bytes(r, step); }

  void run() {
    if (is_divided()) gather_keys();
    const int64_t parts = this->parts();
    each_head(parts, [&](const AttentionItem& whole) {
      const AttentionItem item = queries_of_part(whole, parts);
      if (!item.n) return;
      Carver c{r.memory(thread)};
      const Space s = space(c, r, step, item.n);
      copied = c.bytes(copied_bytes(r, step));
      if (!is_divided())
        fetch(own_rows(item, false), item.n, key_width), fetch(own_rows(item, true), item.n, value_width);
      pack_keys(item, false, s.k);
      pack_keys_transposed(item, true, s.v);
      for (int64_t head = item.kv_head * group; head < (item.kv_head + 1) * group; ++head)
        for (const OwnQueries& own : item.queries) attend_queries(item, s, head, own);
    });
  }

  void attend_queries(const AttentionItem& item, const Space& s, int64_t head, const OwnQueries& own) {
    const int64_t n = item.n, d = value_width;
    const int64_t p_stride = Training::stride(round16(n), r.scratch_bytes()), row = round16(n) + 16;
    const Matrix keys = r.matrix(n, key_width, s.k);
    for (int64_t first = own.first; first < own.end; first += kQueries) {
      const int64_t queries = std::min<int64_t>(kQueries, own.end - first), token = own.token + first - own.first;
      const int64_t low = first_seen(first) / 16 * 16, seen = round16(first + queries) - low;
      const Operand q = key_head(step.q, token, head);
      if (first == own.first) fetch(q, queries, key_width);
      fetch(key_head(step.q, token + queries, head), std::min<int64_t>(kQueries, own.end - first - queries), key_width);
      fetch_to_write(value_head(step.out, token, head), queries, d);
      if (head == item.kv_head * group) fetch_next(item.number, first);
      r.product.multiply(keys, low / 16, tiles_of(first + queries), q.at, q.stride, queries, s.scores, row, false);
      float inverse[kQueries];
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t query = first + i, from = first_seen(query);
        const float* const scores = s.scores + i * row + low;
        const Row p{s.p + i * p_stride, r.tile_type == Type::bf16};
        const float log_sum =
            r.kernels.softmax.row(scores, seen, from - low, query + 1 - low, step.scale, step.soft_cap, inverse + i, p);
        r.floats(step.log_sum_exp, token + i)[head] = with_sink(head, log_sum, inverse + i);
        std::fill_n(p.at + seen * r.scratch_bytes(), (Training::padded(seen) - seen) * r.scratch_bytes(), uint8_t{0});
      }
      Matrix values = r.matrix(d, n, s.v);
      values.cols = seen, values.tiles += low * r.column_bytes();
      r.scratch_product.multiply(values, 0, tiles_of(d), s.p, p_stride, queries, s.sums, round16(d), false);
      for (int64_t i = 0; i < queries; ++i) {
        const Operand o = value_head(step.out, token + i, head);
        r.kernels.row.scale(float_row(s.sums + i * round16(d)), inverse[i], d, {o.at, r.narrow(step.out)});
        if (head + 1 == heads) r.pad(step.out, token + i);
      }
    }
  }

  // Adds the head's sink to the log-sum-exp, and scales `inverse` by the part of the sum without the sink.
  float with_sink(int64_t head, float log_sum, float* inverse) const {
    if (step.sinks < 0) return log_sum;
    const float sink = r.parameter(step.sinks)[head], largest = std::max(sink, log_sum);
    const float with = largest + std::log(std::exp(sink - largest) + std::exp(log_sum - largest));
    *inverse *= std::exp(log_sum - with);
    return with;
  }
};

const RegisteredKind<AttendPacked> kAttendPacked(ckdist_step_attend_packed);

}  // namespace
}  // namespace ckdist
