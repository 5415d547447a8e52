// Parts of AttentionKernel for sparse attention. Private to isa/.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_VECTORS {

void index_scores(const IndexTask& task, const uint8_t* block, float* out);
void attention_copy(const CacheShape& cache, const uint8_t* from, int from_slot, uint8_t* to, int to_slot);

}  // namespace CKDIST_VECTORS
namespace CKDIST_ISA {

void index_codes(const float* q, int width, int heads, int16_t* codes, float* scales);
void code_scores(const IndexTask& task, const uint8_t* const* blocks, int count, float* out);

}  // namespace CKDIST_ISA
}  // namespace ckdist
