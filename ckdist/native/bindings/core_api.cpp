#include "api/core_api.h"
#include "core/arena.h"
#include "core/dtype.h"
#include "core/error.h"
#include "kernels/kernels.h"
#include "kernels/layout.h"

namespace ckdist {
const char* last_error_message();
}

const char* ckdist_last_error(void) { return ckdist::last_error_message(); }
const char* ckdist_isa_name(int32_t i) {
  const auto& levels = ckdist::levels();
  return i >= 0 && size_t(i) < levels.size() ? levels[i].kernels->name : nullptr;
}
const char* ckdist_isa_lacks(int32_t i) {
  const auto& levels = ckdist::levels();
  return i >= 0 && size_t(i) < levels.size() ? levels[i].lacks.c_str() : nullptr;
}
int ckdist_isa(const char** out) {
  return ckdist::guard([&] { *out = ckdist::kernels().name; });
}
int ckdist_use_isa(const char* isa) {
  return ckdist::guard([&] { ckdist::use_kernels(isa); });
}
int64_t ckdist_type_block_elements(int32_t type) { return ckdist::type_traits(type).block_elements; }
int64_t ckdist_type_block_bytes(int32_t type) { return ckdist::type_traits(type).block_bytes; }
int64_t ckdist_available_memory(void) { return ckdist::available_memory(); }
int64_t ckdist_promised_memory(void) { return ckdist::promised_memory(); }
int64_t ckdist_type_undivided_columns(int32_t type) {
  return ckdist::undivided_columns(static_cast<ckdist::Type>(type));
}
static_assert(ckdist_type_count == ckdist::kTypeCount && ckdist_own_types == ckdist::kOwnTypes);
const char* ckdist_type_name(int32_t type) { return ckdist::type_traits(type).name; }
