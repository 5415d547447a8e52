#include "kernels/isa/attention_parts.h"

#include "kernels/isa/attention_rotation.h"
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_ISA {

Shape shape_of(const AttentionTask& task) {
  Shape shape;
  shape.queries = int64_t{task.tokens} * task.heads;
  shape.lanes = round_lanes(shape.queries);
  shape.columns = task.value_width;
  // Floats that were converted from codes already include their scales.
  const bool integers = is_integer(task.key_type) && is_integer(task.value_type);
  shape.group = integers ? group_of(task.value_type, task.value_width) : task.value_width;
  shape.width = round_lanes(task.value_width);
  shape.by_lane = integers && shape.queries > kFew;
  shape.whole = integers ? 65536.0f : 1.0f;
  return shape;
}

void clear_lanes(const Shape& shape, const SpanPart& state) {
  for (int64_t i = 0; i < shape.lanes; ++i) state.largest[i] = -__builtin_inff();
  std::memset(state.sum, 0, 4 * shape.lanes * (1 + shape.groups()));
}

void clear(const Shape& shape, const SpanPart& state) {
  clear_lanes(shape, state);
  std::memset(state.values, 0, 4 * shape.values());
}

void merge_lanes(const Shape& shape, const SpanPart& part, const SpanPart& state, float* factors, int64_t first,
                 int64_t last) {
  for (int64_t at = first; at < last; at += kLanes) {
    const Vec before = load(state.largest + at), here = load(part.largest + at);
    const Vec now = max(here, before);
    const Vec shift = select(less(now, set(-3e38f)), set(0.0f), now);  // no score yet: all weights are exp(-inf)
    const Vec kept = exp(before - shift), added = exp(here - shift);
    store(state.largest + at, now);
    store(state.sum + at, fma(load(state.sum + at), kept, load(part.sum + at) * added));
    store(factors + at, kept);
    for (int g = 0; g < shape.groups(); ++g)
      store(factors + (1 + g) * shape.lanes + at, load(part.unit + g * shape.lanes + at) * added);
  }
}

void merge_part(const Shape& shape, const SpanPart& part, const SpanPart& state, float* factors, int64_t first,
                int64_t last) {
  merge_lanes(shape, part, state, factors, first, last);
  if (shape.by_lane) {
    for (int64_t at = first; at < last; at += kLanes) {
      float* values = state.values + at * shape.columns;
      const float* more = part.values + at * shape.columns;
      const Vec kept = load(factors + at);
      for (int i = 0; i < shape.columns;) {
        const Vec unit = load(factors + (1 + i / shape.group) * shape.lanes + at);
        for (const int end = i + shape.group; i < end; ++i)
          store(values + i * kLanes, fma(load(values + i * kLanes), kept, load(more + i * kLanes) * unit));
      }
    }
    return;
  }
  for (int64_t row = first; row < last && row < shape.queries; ++row) {
    float* values = state.values + row * shape.width;
    const float* more = part.values + row * shape.width;
    const Vec kept = set(factors[row]);
    for (int64_t i = 0; i < shape.width; i += kLanes) {
      const Vec unit = set(factors[(1 + i / shape.group) * shape.lanes + row]);
      store(values + i, fma(load(values + i), kept, load(more + i) * unit));
    }
  }
}

Vec inverse_sums(const AttentionTask& task, const Shape& shape, const SpanPart& state, int64_t at) {
  Vec sum = load(state.sum + at);
  if (task.sinks) {
    float sinks[kLanes] = {};
    for (int64_t i = 0; i < kLanes && at + i < shape.queries; ++i) sinks[i] = task.sinks[(at + i) % task.heads];
    sum = fma(exp(load(sinks) - load(state.largest + at)), set(shape.whole), sum);
  }
  return set(1.0f) / sum;
}

void finish(const AttentionTask& task, const Shape& shape, const SpanPart& state) {
  const auto row_of = [&](int64_t row) {
    return task.out + row / task.heads * task.out_token_stride + row % task.heads * task.out_head_stride;
  };
  const auto lanes_from = [&](int column) {
    return task.value_width - column < kLanes ? task.value_width - column : kLanes;
  };
  // Adding 0 converts -0 to +0.
  if (!shape.by_lane) {
    float inverses[kLanes];
    for (int64_t row = 0; row < shape.queries; ++row) {
      if (row % kLanes == 0) store(inverses, inverse_sums(task, shape, state, row));
      float* out = row_of(row);
      const Vec inverse = set(inverses[row % kLanes]);
      for (int i = 0; i < task.value_width; i += kLanes)
        store_n(out + i, load(state.values + row * shape.width + i) * inverse + set(0.0f), lanes_from(i));
      if (is_rotated(task.value_type)) rotate_blocks(out, task.value_width);
    }
    return;
  }
  for (int64_t at = 0; at < shape.queries; at += kLanes) {
    const int rows = shape.queries - at < kLanes ? static_cast<int>(shape.queries - at) : kLanes;
    float *out[kLanes], *next[kLanes];
    for (int r = 0; r < rows; ++r)
      out[r] = row_of(at + r), next[r] = row_of(at + kLanes + r < shape.queries ? at + kLanes + r : at + r);
    const Vec inverse = inverse_sums(task, shape, state, at);
    for (int i = 0; i < task.value_width; i += kLanes) {
      Vec tile[kLanes];
      for (int j = 0; j < kLanes; ++j)
        tile[j] = j < lanes_from(i) ? load(state.values + at * shape.columns + (i + j) * kLanes) * inverse + set(0.0f)
                                    : set(0.0f);
      transpose(tile);
      for (int r = 0; r < rows; ++r) {
        store_n(out[r] + i, tile[r], lanes_from(i));
        __builtin_prefetch(next[r] + i, 1);
      }
    }
    if (is_rotated(task.value_type))
      for (int r = 0; r < rows; ++r) rotate_blocks(out[r], task.value_width);
  }
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
