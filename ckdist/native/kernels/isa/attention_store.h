// Writing keys and values into blocks of the KV cache. Private to isa/.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_VECTORS {

int64_t attention_block_bytes(KvType type, int head_dim);
void attention_store(KvType type, uint8_t* block, int slot, int head_dim, const float* k, const float* v);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
