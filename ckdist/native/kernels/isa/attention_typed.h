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

// True if AMX computes the task. Then queries are in rows, as for vectors with few queries.
[[maybe_unused]] bool in_tiles([[maybe_unused]] const AttentionTask& task) {
#ifdef __AMX_INT8__
  return task.key_type == KvType::i16 && task.value_type == KvType::i16 && int64_t{task.tokens} * task.heads > kFew;
#else
  return false;
#endif
}

// Converts `count` queries from `first` on, at most sixteen, to codes (count, key_width).
void code_queries(const AttentionTask& task, const Workspace& work, int64_t first, int count) {
  const float *queries[kLanes], *rests[kLanes];
  const int width = task.latent ? task.value_width : task.key_width;
  for (int r = 0; r < count; ++r) {
    const int64_t row = first + r;
    queries[r] = task.q + row / task.heads * task.q_token_stride + row % task.heads * task.q_head_stride;
    if (is_rotated(task.key_type)) {
      float* rotated = work.rotated + r * task.key_width;
      std::memcpy(rotated, queries[r], 4 * task.key_width);
      rotate_key(task.cache(), rotated);
      queries[r] = rotated;
    }
    rests[r] = queries[r] + width;
  }
  float scales[kLanes], rest[kLanes];
  quantise_rows([&](int r) { return queries[r]; }, count, width, kLargestCode, kLongest, work.codes, task.key_width,
                scales);
  if (width < task.key_width)
    quantise_rows([&](int r) { return rests[r]; }, count, task.key_width - width, kLargestCode, kLongest,
                  work.codes + width, task.key_width, rest);
  for (int r = 0; r < count; ++r) {
    work.behind[first + r] = 1.0f;
    if (width < task.key_width) {
      if (scales[r] == 0.0f) scales[r] = rest[r];
      else work.behind[first + r] = rest[r] / scales[r];
    }
    work.factor[first + r] = scales[r] * task.scale;
  }
}

void prepare_queries(const AttentionTask& task, const Shape& shape, const Workspace& work) {
  const int width = task.key_width;
  for (int64_t first = 0; first < shape.queries; first += kLanes) {
    const int count = shape.queries - first < kLanes ? static_cast<int>(shape.queries - first) : kLanes;
    code_queries(task, work, first, count);
#ifdef __AMX_INT8__
    if (in_tiles(task)) {
      const int64_t bytes = row_bytes(task.cache());
      uint8_t* high = reinterpret_cast<uint8_t*>(work.q) + first * 2 * bytes;
      for (int r = 0; r < count; ++r, high += bytes)
        lay_out_query(task.cache(), work.codes + r * width, high, high + kTileQueries * bytes);
      continue;
    }
#endif
    if (shape.by_lane) {
      for (int r = count; r < kLanes; ++r) {
        std::memset(work.codes + r * width, 0, 2 * width);
        work.factor[first + r] = 0.0f;
        work.behind[first + r] = 1.0f;
      }
      move_to_lanes(work.codes, width, work.q + first * width);
      continue;
    }
    const int rows = rows_of_group(shape);
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r, group = row / rows * rows;
      const int64_t together = shape.queries - group < rows ? shape.queries - group : rows;
      int16_t* packed = work.q + group * width + (row - group) * 2;
      for (int i = 0; i < width; i += 2) std::memcpy(packed + i * together, work.codes + r * width + i, 4);
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
