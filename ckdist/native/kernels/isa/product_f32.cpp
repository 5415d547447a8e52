// Training's products in float32, which need only vector instructions.
#if defined(__AVX2__)
#include "kernels/isa/product_panels.h"
#else
#include "kernels/isa/product_blocks.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

extern const ProductKernel f32_product = product_kernel<Form::f32>();

}  // namespace CKDIST_ISA
}  // namespace ckdist
