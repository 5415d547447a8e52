// Preparation of activations, once per layer input: the entry `prepare` of the ISA's ElementwiseKernel.
#pragma once
#include "kernels/linear.h"

namespace ckdist {
namespace CKDIST_VECTORS {

// One ActivationRow from `n` floats that stand at columns [lead, lead + n) of `cols` columns; zeros elsewhere, padding
// included. A group of 32 with an infinity or a NaN gets a NaN scale: it shows in the result and is not clipped away.
void prepare_activations(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
