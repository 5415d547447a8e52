// Causal grouped-query attention within packed sequences.
#include <cmath>

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
    Space s;
    s.k = c.bytes(tiles_of(tokens) * r.tile_bytes(key_width_of(r, step)));
    s.v = c.bytes(tiles_of(values) * r.tile_bytes(tokens));
    s.p = c.bytes(kQueries * Training::stride(round16(tokens), r.scratch_bytes()));
    s.scores = c.floats(kQueries * (round16(tokens) + 16));
    s.sums = c.floats(kQueries * round16(values));
    return s;
  }

  static int64_t thread_bytes(const Training& r, const Fields& step) {
    Carver c;
    space(c, r, step, r.program.max_tokens);
    return c.used;
  }

  void run() {
    each_head([&](int64_t item) { attend_item(item); });
  }

  void attend_item(int64_t item) {
    const int64_t sequence = item / kv_heads, kv_head = item % kv_heads;
    const int64_t begin = r.batch.starts[sequence], n = r.batch.starts[sequence + 1] - begin, d = value_width;
    Carver c{r.memory(thread)};
    const Space s = space(c, r, step, n);
    const int64_t p_stride = Training::stride(round16(n), r.scratch_bytes()), row = round16(n) + 16;
    const Operand k = key_head(step.k, begin, kv_head), v = value_head(step.v, begin, kv_head);
    fetch(k, n, key_width), fetch(v, n, d);
    pack_rows(k, n, key_width, s.k);
    pack_columns(v, n, d, s.v);
    const Matrix keys = r.matrix(n, key_width, s.k);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t first = 0; first < n; first += kQueries) {
        const int64_t queries = std::min<int64_t>(kQueries, n - first);
        const int64_t low = first_seen(first) / 16 * 16, seen = round16(first + queries) - low;
        const Operand q = key_head(step.q, begin + first, head);
        if (first == 0) fetch(q, queries, key_width);
        fetch(key_head(step.q, begin + first + queries, head), std::min<int64_t>(kQueries, n - first - queries),
              key_width);
        fetch_to_write(value_head(step.out, begin + first, head), queries, d);
        if (head == kv_head * group) fetch_next(item, first);
        r.product.multiply(keys, low / 16, tiles_of(first + queries), q.at, q.stride, queries, s.scores, row, false);
        float inverse[kQueries];
        for (int64_t i = 0; i < queries; ++i) {
          const int64_t own = first + i, from = first_seen(own);
          const float* const scores = s.scores + i * row + low;
          const Row p{s.p + i * p_stride, r.tile_type == Type::bf16};
          const float log_sum =
              r.kernels.softmax.row(scores, seen, from - low, own + 1 - low, step.scale, step.soft_cap, inverse + i, p);
          r.floats(step.log_sum_exp, begin + own)[head] = with_sink(head, log_sum, inverse + i);
          std::fill_n(p.at + seen * r.scratch_bytes(), (Training::padded(seen) - seen) * r.scratch_bytes(), uint8_t{0});
        }
        Matrix values = r.matrix(d, n, s.v);
        values.cols = seen, values.tiles += low * r.column_bytes();
        r.scratch_product.multiply(values, 0, tiles_of(d), s.p, p_stride, queries, s.sums, round16(d), false);
        for (int64_t i = 0; i < queries; ++i) {
          const Operand o = value_head(step.out, begin + first + i, head);
          r.kernels.row.scale({reinterpret_cast<uint8_t*>(s.sums + i * round16(d)), false}, inverse[i], d,
                              {o.at, r.narrow(step.out)});
          if (head + 1 == heads) r.pad(step.out, begin + first + i);
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

const RegisteredKind<AttendPacked> kKind(ckdist_step_attend_packed);

}  // namespace
}  // namespace ckdist
