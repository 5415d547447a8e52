// The attention kernels of this ISA: the choice of the kernel for a cache, and the merging of spans' parts.
#include "kernels/attention.h"

#include "kernels/isa/attention_float.h"
#include "kernels/isa/attention_index.h"
#include "kernels/isa/attention_integer.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/attention_store.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

int64_t most_part_floats(int width, int tokens, int heads) {
  const int64_t lanes = round_lanes(int64_t{tokens} * heads), groups = width % 32 == 0 ? width / 32 : 1;
  return lanes * (3 + groups + round_lanes(width));
}

int64_t scratch_bytes(const CacheShape& cache, int tokens, int heads) {
  const int64_t floats[] = {float_scratch_floats(cache, tokens, heads), integer_scratch_floats(cache, tokens, heads),
                            2 * most_part_floats(cache.value_width, tokens, heads)};
  int64_t most = floats[0];
  for (int64_t n : floats) most = n > most ? n : most;
  return 4 * most;
}

// True if both are integers. If only one is, its codes are converted to floats.
bool integers(const AttentionTask& task) { return is_integer(task.key_type) && is_integer(task.value_type); }

Shape shape_here(const AttentionTask& task) { return integers(task) ? shape_of_integers(task) : shape_of(task); }

int64_t part_bytes(const CacheShape& cache, int tokens, int heads) {
  AttentionTask task = {};
  task.key_type = cache.key_type, task.value_type = cache.value_type;
  task.key_width = cache.key_width, task.value_width = cache.value_width, task.latent = cache.latent;
  task.tokens = tokens, task.heads = heads;
  return 4 * shape_here(task).part_floats();
}

void attend(const AttentionTask& task, uint8_t* scratch) {
  float* floats = reinterpret_cast<float*>(scratch);
  integers(task) ? attend_integer(task, floats) : attend_float(task, floats);
}

void attend_spans(const AttentionTask& task, int64_t first, int64_t last, uint8_t* parts, uint8_t* scratch) {
  float* into = reinterpret_cast<float*>(parts);
  float* floats = reinterpret_cast<float*>(scratch);
  integers(task) ? attend_integer_spans(task, first, last, into, floats)
                 : attend_float_spans(task, first, last, into, floats);
}

void merge(const AttentionTask& task, uint8_t* parts, uint8_t* scratch) {
  const Shape shape = shape_here(task);
  float* factors = reinterpret_cast<float*>(scratch);
  const SpanPart state(factors + (1 + shape.groups()) * shape.lanes, shape);
  clear(shape, state);
  for (int64_t span = task.first_span(); span < task.last_span(); ++span, parts += 4 * shape.part_floats())
    merge_part(shape, SpanPart(reinterpret_cast<float*>(parts), shape), state, factors, 0, shape.lanes);
  finish(task, shape, state);
}

void scores(const IndexTask& task, const uint8_t* const* blocks, int count, float* out) {
  if (task.type == KvType::i16) return code_scores(task, blocks, count, out);
  const int64_t each = int64_t{kBlockTokens} * (task.weights ? 1 : task.heads);
  for (int b = 0; b < count; ++b) index_scores(task, blocks[b], out + b * each);
}

}  // namespace

extern const AttentionKernel attention_kernel = {
    attention_block_bytes, attention_store, attention_store_block, scratch_bytes, part_bytes,    attend,
    attend_spans,          merge,           index_codes,           scores,        attention_copy};

}  // namespace CKDIST_ISA
}  // namespace ckdist
