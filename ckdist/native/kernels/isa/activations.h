// One token's activations in the format that a matrix kernel reads. Private to isa/.
#pragma once
#include "kernels/linear.h"

namespace ckdist {
namespace CKDIST_ISA {

void prepare_activations(ActivationFormat format, const float* x, int64_t n, int64_t lead, int64_t cols, uint8_t* row);

}  // namespace CKDIST_ISA
}  // namespace ckdist
