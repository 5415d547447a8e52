// Attention over a cache of floats. Private to isa/.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_VECTORS {

int64_t float_scratch_floats(const CacheShape& cache, int tokens, int heads);
void attend_float(const AttentionTask& task, float* scratch);
void attend_float_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
