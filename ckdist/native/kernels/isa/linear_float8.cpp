// Products of 8-bit floats, which need the dot product of bfloat16.
#include "kernels/isa/linear_float8.h"

#include "kernels/isa/pack_tile.h"
#if defined(__AMX_BF16__)
#include "kernels/isa/float8_amx.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#if defined(__AMX_BF16__)
constexpr auto product = multiply_float8_in_tiles;
#else
constexpr auto product = multiply<Float8Product>;
#endif

}  // namespace

extern const LinearKernel float8_kernel = {activation_format(kFormats, Type::f8_e4m3),
                                           Tiles<Type::f8_e4m3>::tile_bytes,
                                           CKDIST_VECTORS::pack_tile<Type::f8_e4m3>,
                                           Tiles<Type::f8_e4m3>::unpack_row,
                                           product,
                                           prompt_format(kFormats, Type::f8_e4m3),
                                           nullptr};

}  // namespace CKDIST_ISA
}  // namespace ckdist
