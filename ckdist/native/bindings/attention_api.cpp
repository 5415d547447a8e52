#include <algorithm>
#include <vector>

#include "core/export.h"

#include "api/attention.h"
#include "bindings/isa_choice.h"

namespace {

using namespace ckdist;

KvType checked_type(int32_t type, int32_t head_dim) {
  if (type != 0 && type != 1 && type != 8 && type != 25 && type != 30)
    fail(Status::config, "KV type %d is not known; use 0 (f32), 1 (f16), 8 (q8_0), 25 (i16) or 30 (bf16)", type);
  if (head_dim <= 0 || head_dim % 8 || head_dim > 4096)
    fail(Status::config, "head_dim (%d) must be a multiple of 8 from 8 to 4096", head_dim);
  return static_cast<KvType>(type);
}

AttentionTask checked_task(const ckdist_attention_task& t) {
  AttentionTask task;
  task.kv_type = checked_type(t.kv_type, t.head_dim);
  if (t.tokens < 1 || t.heads < 1 || t.first_position < 0)
    fail(Status::config, "attention needs tokens (%d) and heads (%d) of at least 1 and a position (%lld) of at least 0",
         t.tokens, t.heads, static_cast<long long>(t.first_position));
  task.head_dim = t.head_dim;
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
  return task;
}

}  // namespace

extern "C" {

int64_t ckdist_attention_block_bytes(const char* isa, int32_t kv_type, int32_t head_dim) {
  int64_t bytes = 0;
  const int status =
      guard([&] { bytes = kernels_by_name(isa).attention.block_bytes(checked_type(kv_type, head_dim), head_dim); });
  return status < 0 ? status : bytes;
}

int32_t ckdist_attention_store(const char* isa, int32_t kv_type, uint8_t* block, int32_t slot, int32_t head_dim,
                               const float* k, const float* v) {
  return guard([&] {
    const KvType type = checked_type(kv_type, head_dim);
    if (slot < 0 || slot >= kBlockTokens)
      fail(Status::config, "slot (%d) must be from 0 to %d", slot, kBlockTokens - 1);
    kernels_by_name(isa).attention.store(type, block, slot, head_dim, k, v);
  });
}

int64_t ckdist_attention_scratch_bytes(const char* isa, int32_t tokens, int32_t heads, int32_t head_dim) {
  int64_t bytes = 0;
  const int status = guard([&] { bytes = kernels_by_name(isa).attention.scratch_bytes(tokens, heads, head_dim); });
  return status < 0 ? status : bytes;
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
    const int64_t part_bytes = kernel.part_bytes(task.kv_type, task.tokens, task.heads, task.head_dim);
    std::vector<uint8_t> parts((task.last_span() - task.first_span()) * part_bytes, 0xFF);
    for (int64_t first = task.first_span(); first < task.last_span(); first += spans)
      kernel.attend_spans(task, first, std::min(first + spans, task.last_span()),
                          parts.data() + (first - task.first_span()) * part_bytes, scratch);
    kernel.merge(task, parts.data(), scratch);
  });
}

}  // extern "C"
