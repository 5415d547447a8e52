// Training's products in bfloat16: with tiles, with the dot product of bfloat16, or else with vectors of widened
// values.
#if defined(__AMX_BF16__)
#include "kernels/isa/product_amx.h"
#elif defined(__AVX2__)
#include "kernels/isa/product_panels.h"
#else
#include "kernels/isa/product_blocks.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

#if defined(__AMX_BF16__)
extern const ProductKernel bf16_product = {Type::bf16, multiply_columns, nullptr, outer_columns, &kStrips};
#elif defined(__AVX512BF16__)
extern const ProductKernel bf16_product = product_kernel<Form::bf16>();
#else
extern const ProductKernel bf16_product = product_kernel<Form::widened>();
#endif

}  // namespace CKDIST_ISA
}  // namespace ckdist
