// The Hadamard transform of a head, which makes keys and values of few bits more precise. Private to isa/.
//
// Ashkboos et al. 2024, arXiv:2404.00456: the transform spreads an outlier over all dimensions, so that one scale suits
// all elements of a group. The matrix is symmetric and orthonormal. Queries are transformed too, so scores stay the
// same, and a second transform of a weighted sum gives the output.
#pragma once
#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_VECTORS {

// Whether a cache of this type holds transformed vectors.
inline bool is_rotated(KvType type) { return type == KvType::q8_0 || type == KvType::q4_0; }

// Transforms each block of x (width,) in place. A block is the largest power of two that divides the width.
void rotate_blocks(float* x, int width);
// Transforms a key or a query. In a latent cache, the elements after the values are transformed separately.
void rotate_key(const CacheShape& cache, float* x);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
