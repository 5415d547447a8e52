// Attention over an integer cache if keys, values or both have less than 16 bits.
#include "kernels/isa/attention_typed.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Calls run(a code of the type).
template <class Run>
void by_type(KvType type, Run&& run) {
  if (type == KvType::q4_0) run(Nibbles{});
  else type == KvType::q8_0 ? run(int8_t{}) : run(int16_t{});
}

// Calls run(a key's code, a value's code).
template <class Run>
void by_types(const AttentionTask& task, Run&& run) {
  by_type(task.key_type, [&](auto key) {
    by_type(task.value_type, [&](auto value) {
      if constexpr (sizeof key + sizeof value < 4) run(key, value);
    });
  });
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
