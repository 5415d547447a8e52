// The attention kernels of this ISA: which of them reads which cache, and the merging of spans' parts.
#include "kernels/attention.h"

#include "kernels/isa/attention_float.h"
#include "kernels/isa/attention_integer.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/attention_store.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

int64_t most_part_floats(int tokens, int heads, int head_dim) {
  const int64_t lanes = round_lanes(int64_t{tokens} * heads), groups = head_dim % 32 == 0 ? head_dim / 32 : 1;
  return lanes * (3 + groups + round_lanes(head_dim));
}

int64_t scratch_bytes(int tokens, int heads, int head_dim) {
  const int64_t floats[] = {float_scratch_floats(tokens, heads, head_dim),
                            integer_scratch_floats(tokens, heads, head_dim),
                            2 * most_part_floats(tokens, heads, head_dim)};
  int64_t most = floats[0];
  for (int64_t n : floats) most = n > most ? n : most;
  return 4 * most;
}

int64_t part_bytes(KvType type, int tokens, int heads, int head_dim) {
  AttentionTask task = {};
  task.kv_type = type, task.tokens = tokens, task.heads = heads, task.head_dim = head_dim;
  return 4 * shape_of(task).part_floats();
}

void attend(const AttentionTask& task, uint8_t* scratch) {
  float* floats = reinterpret_cast<float*>(scratch);
  is_integer(task.kv_type) ? attend_integer(task, floats) : attend_float(task, floats);
}

void attend_spans(const AttentionTask& task, int64_t first, int64_t last, uint8_t* parts, uint8_t* scratch) {
  float* into = reinterpret_cast<float*>(parts);
  float* floats = reinterpret_cast<float*>(scratch);
  is_integer(task.kv_type) ? attend_integer_spans(task, first, last, into, floats)
                           : attend_float_spans(task, first, last, into, floats);
}

void merge(const AttentionTask& task, uint8_t* parts, uint8_t* scratch) {
  const Shape shape = shape_of(task);
  float* factors = reinterpret_cast<float*>(scratch);
  const SpanPart state(factors + (1 + shape.groups()) * shape.lanes, shape);
  clear(shape, state);
  for (int64_t span = task.first_span(); span < task.last_span(); ++span, parts += 4 * shape.part_floats())
    merge_part(shape, SpanPart(reinterpret_cast<float*>(parts), shape), state, factors, 0, shape.lanes);
  finish(task, shape, state);
}

}  // namespace

extern const AttentionKernel attention_kernel = {
    attention_block_bytes, attention_store, scratch_bytes, part_bytes, attend, attend_spans, merge};

}  // namespace CKDIST_ISA
}  // namespace ckdist
