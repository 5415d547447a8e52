// Training's products in bfloat16. They ask for its dot product; tiles take them as they take those of inference, and
// vectors without either multiply what they widen.
#if defined(__AVX2__) && !defined(__AMX_BF16__)
#include "kernels/isa/product_panels.h"
#else
#include "kernels/isa/product_blocks.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

#if defined(__AVX512BF16__)
extern const ProductKernel bf16_product = product_kernel<Form::bf16>();
#else
extern const ProductKernel bf16_product = product_kernel<Form::widened>();
#endif

}  // namespace CKDIST_ISA
}  // namespace ckdist
