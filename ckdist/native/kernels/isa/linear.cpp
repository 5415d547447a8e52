// The ISA's table of products, one row per weight type.
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include "kernels/isa/linear_amx.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#include "kernels/isa/linear_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/linear_avx2.h"
#else
#include "kernels/isa/linear_baseline.h"
#endif
#include "kernels/isa/pack_tile.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

template <Type type>
constexpr LinearKernel kernel_of() {
#ifdef __AMX_INT8__
  constexpr auto product = multiply_in_tiles<type>;
#else
  constexpr auto product = multiply<Product<type>>;
#endif
  return {activation_of<type>(), Tiles<type>::tile_bytes, pack_tile<type>, Tiles<type>::unpack_row, product};
}

constexpr LinearKernel none = {};

}  // namespace

extern const LinearKernel linear_kernels[kTypeCount] = {
    kernel_of<Type::f32>(),    kernel_of<Type::f16>(),  kernel_of<Type::q4_0>(), kernel_of<Type::q4_1>(), none, none,
    kernel_of<Type::q5_0>(),   kernel_of<Type::q5_1>(), kernel_of<Type::q8_0>(), none,
    kernel_of<Type::q2_k>(),   kernel_of<Type::q3_k>(), kernel_of<Type::q4_k>(), kernel_of<Type::q5_k>(), kernel_of<Type::q6_k>(),
    none, none, none, none, none, kernel_of<Type::iq4_nl>(), none, none, kernel_of<Type::iq4_xs>(),
    none, none, none, none, none, none, kernel_of<Type::bf16>()};

}  // namespace CKDIST_ISA
}  // namespace ckdist
