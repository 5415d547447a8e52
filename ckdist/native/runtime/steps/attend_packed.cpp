// Causal grouped-query attention within packed sequences.
#include "runtime/steps/packed_attention.h"

namespace ckdist {
namespace {

struct AttendPacked : PackedAttention<ckdist_attend_packed_step> {
  struct Space {
    uint8_t *k, *v, *p;
    float *scores, *sums;
  };
  static Space space(Carver& c, const Training& r, int64_t tokens) {
    const int64_t d = r.program.head_dim;
    Space s;
    s.k = c.bytes(tiles_of(tokens) * r.tile_bytes(d));
    s.v = c.bytes(tiles_of(d) * r.tile_bytes(tokens));
    s.p = c.bytes(kQueries * Training::stride(round16(tokens), r.scratch_bytes()));
    s.scores = c.floats(kQueries * (round16(tokens) + 16));
    s.sums = c.floats(kQueries * round16(d));
    return s;
  }

  static int64_t thread_bytes(const Training& r, const Fields&) {
    Carver c;
    space(c, r, r.program.max_tokens);
    return c.used;
  }

  void run() {
    each_head([&](int64_t item) { attend_item(item); });
  }

  void attend_item(int64_t item) {
    const int64_t sequence = item / r.program.kv_heads, kv_head = item % r.program.kv_heads;
    const int64_t begin = r.batch.starts[sequence], n = r.batch.starts[sequence + 1] - begin, d = r.program.head_dim;
    Carver c{r.memory(thread)};
    const Space s = space(c, r, n);
    const int64_t heads = r.width(step.log_sum_exp), group = heads / r.program.kv_heads,
                  p_stride = Training::stride(round16(n), r.scratch_bytes()), row = round16(n) + 16;
    const Operand k = r.head_of(step.k, begin, kv_head), v = r.head_of(step.v, begin, kv_head);
    fetch(k, n), fetch(v, n);
    pack_rows(k, n, d, s.k);
    pack_columns(v, n, d, s.v);
    const Matrix keys = r.matrix(n, d, s.k);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t first = 0; first < n; first += kQueries) {
        const int64_t queries = std::min<int64_t>(kQueries, n - first);
        const int64_t low = first_seen(first) / 16 * 16, seen = round16(first + queries) - low;
        const Operand q = r.head_of(step.q, begin + first, head);
        if (first == 0) fetch(q, queries);
        fetch(r.head_of(step.q, begin + first + queries, head), std::min<int64_t>(kQueries, n - first - queries));
        fetch_to_write(r.head_of(step.out, begin + first, head), queries);
        if (head == kv_head * group) fetch_next(item, first);
        r.product.multiply(keys, low / 16, tiles_of(first + queries), q.at, q.stride, queries, s.scores, row, false);
        float inverse[kQueries];
        for (int64_t i = 0; i < queries; ++i) {
          const int64_t own = first + i, from = first_seen(own);
          const float* const scores = s.scores + i * row + low;
          const Row p{s.p + i * p_stride, r.tile_type == Type::bf16};
          r.floats(step.log_sum_exp, begin + own)[head] =
              r.kernels.softmax.row(scores, seen, from - low, own + 1 - low, step.scale, step.soft_cap, inverse + i, p);
          std::fill_n(p.at + seen * r.scratch_bytes(), (Training::padded(seen) - seen) * r.scratch_bytes(), uint8_t{0});
        }
        Matrix values = r.matrix(d, n, s.v);
        values.cols = seen, values.tiles += low * r.column_bytes();
        r.scratch_product.multiply(values, 0, tiles_of(d), s.p, p_stride, queries, s.sums, round16(d), false);
        for (int64_t i = 0; i < queries; ++i) {
          const Operand o = r.head_of(step.out, begin + first + i, head);
          r.kernels.row.scale({reinterpret_cast<uint8_t*>(s.sums + i * round16(d)), false}, inverse[i], d,
                              {o.at, r.narrow(step.out)});
          if (head + 1 == heads) r.pad(step.out, begin + first + i);
        }
      }
  }
};

const RegisteredKind<AttendPacked> kKind(ckdist_step_attend_packed);

}  // namespace
}  // namespace ckdist
