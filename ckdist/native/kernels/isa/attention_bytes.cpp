// Attention over an integer cache if keys, values or both are bytes (q8_0).
#include "kernels/isa/attention_typed.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Calls run(a key's code, a value's code), whose types are those of the cache.
template <class Run>
void by_types(const AttentionTask& task, Run&& run) {
  const bool key_bytes = task.key_type == KvType::q8_0, value_bytes = task.value_type == KvType::q8_0;
  if (!key_bytes) run(int16_t{}, int8_t{});
  else value_bytes ? run(int8_t{}, int8_t{}) : run(int8_t{}, int16_t{});
}

}  // namespace

void attend_bytes(const AttentionTask& task, float* scratch) {
  by_types(task, [&](auto key, auto value) { attend_typed<decltype(key), decltype(value)>(task, scratch); });
}

void attend_bytes_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  by_types(task, [&](auto key, auto value) {
    attend_spans<decltype(key), decltype(value)>(task, first, last, parts, scratch);
  });
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
