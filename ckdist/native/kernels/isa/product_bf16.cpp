// Training's products in bfloat16: they ask for its dot product. Tiles take them as they take those of inference.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include "kernels/isa/product_panels.h"
#else
#include "kernels/isa/product_blocks.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

extern const ProductKernel bf16_product = product_kernel<true>();

}  // namespace CKDIST_ISA
}  // namespace ckdist
