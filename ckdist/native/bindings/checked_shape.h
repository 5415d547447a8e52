// Refuses a cache of one kv-head that no kernel knows.
#pragma once
#include "api/attention_api.h"
#include "core/error.h"
#include "kernels/attention.h"

namespace ckdist {

inline void check_type(KvType kv_type) {
  const int type = int(kv_type);
  if (type != 0 && type != 1 && type != 2 && type != 8 && type != 25 && type != 30)
    fail(Status::config, "KV type %d is not known; use 0 (f32), 1 (f16), 2 (q4_0), 8 (q8_0), 25 (i16) or 30 (bf16)",
         type);
}

inline CacheShape checked_shape(const CacheShape& cache) {
  for (const int32_t width : {cache.key_width, cache.value_width})
    if (width <= 0 || width % 8 || width > 4096)
      fail(Status::config, "the width of a head (%d) must be a multiple of 8 from 8 to 4096", width);
  if (cache.latent && (cache.key_type != cache.value_type || cache.key_width < cache.value_width))
    fail(Status::config, "latent values of type %d and width %d are not a part of keys of type %d and width %d",
         int(cache.value_type), cache.value_width, int(cache.key_type), cache.key_width);
  check_type(cache.key_type), check_type(cache.value_type);
  return cache;
}

inline CacheShape checked_shape(const ckdist_cache_shape& cache) {
  return checked_shape(CacheShape{KvType(cache.key_type), KvType(cache.value_type), cache.key_width, cache.value_width,
                                  cache.latent != 0});
}

}  // namespace ckdist
