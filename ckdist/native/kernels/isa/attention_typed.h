// Attention over an integer cache for any pair of types. attention_integer.cpp and attention_bytes.cpp instantiate it
// for their types. Private to isa/.
#pragma once
#include "kernels/isa/attention_integer.h"
#include "kernels/isa/attention_lanes.h"
#include "kernels/isa/attention_rotation.h"
#include "kernels/isa/attention_rows.h"
#ifdef __AMX_INT8__
#include "kernels/isa/attention_tiles.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kQueriesAhead = 6;  // queries that are prefetched while one is converted to codes

// True if AMX computes the task. Then queries are in rows, as for vectors with few queries.
[[maybe_unused]] bool in_tiles([[maybe_unused]] const AttentionTask& task) {
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
    // Tokens' rows are pages apart, so the hardware does not prefetch them.
    if (row + kQueriesAhead < shape.queries) {
      const float* next = query(row + kQueriesAhead);
      for (int i = 0; i < task.key_width; i += kLanes) __builtin_prefetch(next + i);
    }
    const int width = task.latent ? task.value_width : task.key_width;
    const float* q = query(row);
    if (is_rotated(task.key_type)) {
      std::memcpy(work.rotated, q, 4 * task.key_width);
      rotate_key(task.cache(), work.rotated);
      q = work.rotated;
    }
    float scale = quantise(q, width, kLargestCode, kLongest, out);
    work.behind[row] = 1.0f;
    if (width < task.key_width) {
      const float rest = quantise(q + width, task.key_width - width, kLargestCode, kLongest, out + width);
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
    for (int i = 0; i < pairs; i += kLanes) {  // moves pairs as floats
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

// Computes one span's part. With a state, merges it; tiles then write the result of queries that see no later span.
template <class Key, class Value>
void attend_span(const AttentionTask& task, const Shape& shape, const Workspace& work, int64_t start,
                 const SpanPart& part, const SpanPart* state) {
  const Span span = open_span<Key, Value>(task, shape, work, start);
#ifdef __AMX_INT8__
  if (in_tiles(task)) return attend_tiles(task, shape, work, span, part, state);
#endif
  const auto done = [&](int64_t first, int64_t last) {
    if (state) merge_part(shape, part, *state, work.factors, first, last);
  };
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
  const bool tiles = in_tiles(task);
  tiles ? clear_lanes(shape, part) : clear(shape, part);
  tiles ? clear_lanes(shape, state) : clear(shape, state);
  for (int64_t s = task.first_span(); s < task.last_span(); ++s)
    attend_span<Key, Value>(task, shape, work, s * kSpan, part, &state);
  if (!tiles) finish(task, shape, state);
}

template <class Key, class Value>
void attend_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of_integers(task);
  prepare_queries(task, shape, work);
  for (int64_t s = first; s < last; ++s) {
    const SpanPart part(parts + (s - first) * shape.part_floats(), shape);
    clear(shape, part);
    attend_span<Key, Value>(task, shape, work, s * kSpan, part, nullptr);
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
