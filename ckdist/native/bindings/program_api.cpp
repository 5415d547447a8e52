#include "core/export.h"

#include "api/program_api.h"
#include "bindings/checked_shape.h"
#include "runtime/cache_arrays.h"

using namespace ckdist;

extern "C" {

int64_t ckdist_cache_bytes(const struct ckdist_cache_array* arrays, int32_t count, enum ckdist_lifetime lifetime) {
  int64_t bytes = 0;
  const int status = guard([&] {
    const CacheArrays cache{arrays, count};
    if (const std::optional<CacheShape> head = cache.shape()) checked_shape(*head);
    bytes = lifetime == ckdist_lifetime_token ? cache.block_bytes() : cache.slot_bytes();
  });
  return status < 0 ? status : bytes;
}

int64_t ckdist_block_stride(int64_t bytes) { return block_stride(bytes); }

}  // extern "C"
