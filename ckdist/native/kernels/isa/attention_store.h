// Writes keys and values to blocks of the KV cache. Private to isa/.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_VECTORS {

int64_t attention_block_bytes(const CacheShape& cache);
void attention_store(const CacheShape& cache, uint8_t* block, int slot, const float* k, const float* v);
void attention_store_block(const CacheShape& cache, uint8_t* block, const float* const* k, const float* const* v);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
