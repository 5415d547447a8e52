#include <algorithm>
#include <vector>

#include "api/attention_api.h"
#include "bindings/checked_shape.h"
#include "bindings/isa_choice.h"

namespace {

using namespace ckdist;

AttentionTask checked_task(const ckdist_attention_task& t) {
  AttentionTask task{};
  const CacheShape cache = checked_shape(t.cache);
  task.key_type = cache.key_type, task.value_type = cache.value_type;
  task.key_width = cache.key_width, task.value_width = cache.value_width, task.latent = cache.latent;
  task.next_kv = nullptr;
  if (t.tokens < 1 || t.heads < 1 || t.first_position < 0)
    fail(Status::config, "attention needs tokens (%d) and heads (%d) of at least 1 and a position (%lld) of at least 0",
         t.tokens, t.heads, static_cast<long long>(t.first_position));
  task.kv = t.kv;
  task.block_stride = t.block_stride;
  task.block_table = t.block_table;
  task.first_position = t.first_position;
  task.tokens = t.tokens;
  task.heads = t.heads;
  task.q = t.q;
  task.q_token_stride = t.q_token_stride;
  task.q_head_stride = t.q_head_stride;
  task.out = t.out;
  task.out_token_stride = t.out_token_stride;
  task.out_head_stride = t.out_head_stride;
  task.scale = t.scale;
  task.soft_cap = t.soft_cap;
  task.window = t.window;
  if (t.context != 0 && t.context < t.first_position + t.tokens)
    fail(Status::config, "a context of %lld tokens ends before the queries do", static_cast<long long>(t.context));
  task.context = t.context;
  task.sinks = t.sinks;
  return task;
}

}  // namespace

int64_t ckdist_attention_block_bytes(const char* isa, const struct ckdist_cache_shape* cache) {
  return guard_value([&] { return kernels_by_name(isa).attention.block_bytes(checked_shape(*cache)); });
}

int32_t ckdist_attention_store(const char* isa, const struct ckdist_cache_shape* cache, uint8_t* block, int32_t slot,
                               const float* k, const float* v) {
  return guard([&] {
    const CacheShape shape = checked_shape(*cache);
    if (slot < 0 || slot >= kBlockTokens)
      fail(Status::config, "slot (%d) must be from 0 to %d", slot, kBlockTokens - 1);
    kernels_by_name(isa).attention.store(shape, block, slot, k, v);
  });
}

int32_t ckdist_attention_store_block(const char* isa, const struct ckdist_cache_shape* cache, uint8_t* block,
                                     const float* k, const float* v) {
  return guard([&] {
    const CacheShape shape = checked_shape(*cache);
    const float *keys[kBlockTokens], *values[kBlockTokens];
    for (int slot = 0; slot < kBlockTokens; ++slot) {
      keys[slot] = k + slot * shape.key_width;
      values[slot] = v ? v + slot * shape.value_width : nullptr;
    }
    kernels_by_name(isa).attention.store_block(shape, block, keys, values);
  });
}

int64_t ckdist_attention_scratch_bytes(const char* isa, const struct ckdist_cache_shape* cache, int32_t tokens,
                                       int32_t heads) {
  return guard_value(
      [&] { return kernels_by_name(isa).attention.scratch_bytes(checked_shape(*cache), tokens, heads); });
}

int32_t ckdist_attend(const char* isa, const struct ckdist_attention_task* task, uint8_t* scratch) {
  return guard([&] { kernels_by_name(isa).attention.attend(checked_task(*task), scratch); });
}

int32_t ckdist_attend_in_parts(const char* isa, const struct ckdist_attention_task* given, int64_t spans,
                               uint8_t* scratch) {
  return guard([&] {
    const AttentionTask task = checked_task(*given);
    if (spans < 1) fail(Status::config, "spans at a time (%lld) must be at least 1", static_cast<long long>(spans));
    const AttentionKernel& kernel = kernels_by_name(isa).attention;
    const int64_t part_bytes = kernel.part_bytes(task.cache(), task.tokens, task.heads);
    std::vector<uint8_t> parts((task.last_span() - task.first_span()) * part_bytes, 0xFF);
    for (int64_t first = task.first_span(); first < task.last_span(); first += spans)
      kernel.attend_spans(task, first, std::min(first + spans, task.last_span()),
                          parts.data() + (first - task.first_span()) * part_bytes, scratch);
    kernel.merge(task, parts.data(), scratch);
  });
}
