// Attention over a cache of integers (i16, q8_0): both products are dot products of 16-bit integers in pairs.
//
// One instruction does twice the products of a float multiplication, on every ISA, and reads the cache as it lies.
// Queries become 16-bit codes with a scale each, weights become whole numbers of 2^-16 of the span's largest and then
// codes: what that rounds away is less than what float16 keys and values lose (tests/kernels/test_attention.py has both
// numbers). Integer sums are exact, so two shapes of the same work give the same bits: for few queries a lane is a
// position (scores) or a dimension (values), and each load of the cache serves all queries; for many a lane is a query,
// and nothing but broadcasts of the cache is read in the inner loop.
//
// Per span: scores, their largest, weights = round(2^16 exp(score - largest)) whose sum is exact in a float too, codes
// of weight times scale of V, and the weighted sums.
#include "kernels/isa/attention_integer.h"

#include "kernels/isa/attention_lanes.h"
#include "kernels/isa/attention_rows.h"
#ifdef __AMX_INT8__
#include "kernels/isa/attention_tiles.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kQueriesAhead = 6;  // that are fetched while one is made codes

// Whether AMX takes the task: queries in rows, as vectors have few of them.
bool in_tiles([[maybe_unused]] const AttentionTask& task) {
#ifdef __AMX_INT8__
  return task.key_type == KvType::i16 && task.value_type == KvType::i16 && int64_t{task.tokens} * task.heads > kFew;
#else
  return false;
#endif
}

void prepare_queries(const AttentionTask& task, const Shape& shape, const Workspace& work) {
  const auto query = [&](int64_t row) {
    return task.q + row / task.heads * task.q_token_stride + row % task.heads * task.q_head_stride;
  };
  const auto codes = [&](int64_t row, int16_t* out) {
    // Tokens' rows are pages apart, so no hardware brings the next ones.
    if (row + kQueriesAhead < shape.queries) {
      const float* next = query(row + kQueriesAhead);
      for (int i = 0; i < task.key_width; i += kLanes) __builtin_prefetch(next + i);
    }
    const int width = task.latent ? task.value_width : task.key_width;
    float scale = quantise(query(row), width, kLargestCode, kLongest, out);
    work.behind[row] = 1.0f;
    if (width < task.key_width) {
      const float rest = quantise(query(row) + width, task.key_width - width, kLargestCode, kLongest, out + width);
      if (scale == 0.0f) scale = rest;
      else work.behind[row] = rest / scale;
    }
    work.factor[row] = scale * task.scale;
  };
#ifdef __AMX_INT8__
  if (in_tiles(task)) {
    const int64_t bytes = row_bytes(task.cache());
    for (int64_t row = 0; row < shape.queries; ++row) {
      uint8_t* group = reinterpret_cast<uint8_t*>(work.q) + row / kTileQueries * kTileQueries * 2 * bytes;
      uint8_t* high = group + row % kTileQueries * bytes;
      codes(row, work.codes);
      lay_out_query(task.cache(), work.codes, high, high + kTileQueries * bytes);
    }
    return;
  }
#endif
  if (!shape.by_lane) {
    const int rows = rows_of_group(shape);
    for (int64_t row = 0; row < shape.queries; ++row) {
      const int64_t group = row / rows * rows, count = shape.queries - group < rows ? shape.queries - group : rows;
      int16_t* packed = work.q + group * task.key_width + (row - group) * 2;
      codes(row, work.codes);
      for (int i = 0; i < task.key_width; i += 2) std::memcpy(packed + i * count, work.codes + i, 4);
    }
    return;
  }
  const int pairs = task.key_width / 2;
  for (int64_t at = 0; at < shape.lanes; at += kLanes) {
    for (int r = 0; r < kLanes; ++r) {
      if (at + r < shape.queries) {
        codes(at + r, work.codes + r * task.key_width);
      } else {
        std::memset(work.codes + r * task.key_width, 0, 2 * task.key_width);
        work.factor[at + r] = 0.0f;
        work.behind[at + r] = 1.0f;
      }
    }
    for (int i = 0; i < pairs; i += kLanes) {  // pairs are moved as floats are
      const int count = pairs - i < kLanes ? pairs - i : kLanes;
      Vec tile[kLanes];
      for (int r = 0; r < kLanes; ++r)
        tile[r] = load_n(reinterpret_cast<const float*>(work.codes + r * task.key_width + 2 * i), count);
      transpose(tile);
      for (int j = 0; j < count; ++j)
        store(reinterpret_cast<float*>(work.q + at * task.key_width + (i + j) * 2 * kLanes), tile[j]);
    }
  }
}

// One span into its part; done(first lane, last lane) when these are there.
template <class Key, class Value, class Done>
void attend_span(const AttentionTask& task, const Shape& shape, const Workspace& work, int64_t start,
                 const SpanPart& part, Done&& done) {
  const Span span = open_span<Key, Value>(task, shape, work, start);
#ifdef __AMX_INT8__
  if (in_tiles(task)) return attend_tiles(task, shape, work, span, part, done);
#endif
  if (shape.by_lane) return attend_lanes<Key, Value>(task, shape, work, span, part, done);
  attend_rows<Key, Value>(task, shape, work, span, part);
  done(0, shape.lanes);
}

template <class Key, class Value>
void attend_typed(const AttentionTask& task, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of_integers(task);
  const SpanPart part(work.part, shape), state(work.state, shape);
  prepare_queries(task, shape, work);
  clear(shape, part);
  clear(shape, state);
  for (int64_t s = task.first_span(); s < task.last_span(); ++s)
    attend_span<Key, Value>(task, shape, work, s * kSpan, part, [&](int64_t first, int64_t last) {
      merge_part(shape, part, state, work.factors, first, last);
    });
  finish(task, shape, state);
}

template <class Key, class Value>
void attend_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of_integers(task);
  prepare_queries(task, shape, work);
  for (int64_t s = first; s < last; ++s) {
    const SpanPart part(parts + (s - first) * shape.part_floats(), shape);
    clear(shape, part);
    attend_span<Key, Value>(task, shape, work, s * kSpan, part, [](int64_t, int64_t) {});
  }
}

// Calls run(a key's code, a value's code).
template <class Run>
void by_types(const AttentionTask& task, Run&& run) {
  const bool key_bytes = task.key_type == KvType::q8_0, value_bytes = task.value_type == KvType::q8_0;
  if (key_bytes) value_bytes ? run(int8_t{}, int8_t{}) : run(int8_t{}, int16_t{});
  else value_bytes ? run(int16_t{}, int8_t{}) : run(int16_t{}, int16_t{});
}

}  // namespace

Shape shape_of_integers(const AttentionTask& task) {
  Shape shape = shape_of(task);
  shape.by_lane = shape.by_lane && !in_tiles(task);
  return shape;
}

int64_t integer_scratch_floats(const CacheShape& cache, int tokens, int heads) {
  return Workspace(nullptr, cache, tokens, heads).floats;
}

void attend_integer(const AttentionTask& task, float* scratch) {
  by_types(task, [&](auto key, auto value) { attend_typed<decltype(key), decltype(value)>(task, scratch); });
}

void attend_integer_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  by_types(task, [&](auto key, auto value) {
    attend_spans<decltype(key), decltype(value)>(task, first, last, parts, scratch);
  });
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
