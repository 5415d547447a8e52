// Products of bfloat16 weights, which need the dot product of bfloat16.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {

extern const LinearKernel bf16_kernel = kernel_of<Type::bf16>();

}  // namespace CKDIST_ISA
}  // namespace ckdist
