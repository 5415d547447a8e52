// Training's products in float32, which ask for no instruction beyond vectors.
#if defined(__AVX512F__)
#include "kernels/isa/product_panels.h"
#else
#include "kernels/isa/product_blocks.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

extern const ProductKernel f32_product = product_kernel<false>();

}  // namespace CKDIST_ISA
}  // namespace ckdist
