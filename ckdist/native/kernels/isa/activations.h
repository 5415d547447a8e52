// Preparation of activations, once per layer input: the entry `prepare` of the ISA's ElementwiseKernel.
#pragma once
#include "kernels/linear.h"

namespace ckdist {
namespace CKDIST_VECTORS {

// Writes one ActivationRow from `n` floats, which are columns [lead, lead + n) of `cols` columns. Other columns and the
// padding are zeros. A group of 32 with an infinity or a NaN gets a NaN scale, so that it shows in the result and is
// not clipped.
void prepare_activations(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);
void prepare_in_strip(const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
