#include "api/program_api.h"
#include "bindings/checked_shape.h"
#include "runtime/cache_arrays.h"

using namespace ckdist;

int64_t ckdist_cache_bytes(const struct ckdist_cache_array* arrays, int32_t count, enum ckdist_lifetime lifetime) {
  return guard_value([&] {
    const CacheArrays cache{arrays, count};
    if (const std::optional<CacheShape> head = cache.shape()) checked_shape(*head);
    return lifetime == ckdist_lifetime_token ? cache.block_bytes() : cache.slot_bytes();
  });
}

int64_t ckdist_block_stride(int64_t bytes) { return block_stride(bytes); }
