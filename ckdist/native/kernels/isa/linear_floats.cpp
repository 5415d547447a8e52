// Products of float32 and float16 weights, which need only vector instructions.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {

extern const LinearKernel f32_kernel = kernel_of<Type::f32>(), f16_kernel = kernel_of<Type::f16>();

}  // namespace CKDIST_ISA
}  // namespace ckdist
