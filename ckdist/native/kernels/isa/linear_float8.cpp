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
template <Type type>
constexpr auto kMultiply = multiply_float8_in_tiles<type>;
#else
template <Type type>
constexpr auto kMultiply = multiply<Float8Product<type>>;
#endif

constexpr KernelTable make_table() {
  KernelTable table = {};
#define CKDIST_KERNEL(name)                                                          \
  table.of[static_cast<int>(Type::name)] = {activation_format(kFormats, Type::name), \
                                            Tiles<Type::name>::tile_bytes,           \
                                            CKDIST_VECTORS::pack_tile<Type::name>,   \
                                            Tiles<Type::name>::unpack_row,           \
                                            kMultiply<Type::name>,                   \
                                            prompt_format(kFormats, Type::name),     \
                                            nullptr};
  CKDIST_EACH_FLOAT8_TYPE(CKDIST_KERNEL)
#undef CKDIST_KERNEL
  return table;
}

}  // namespace

extern const KernelTable float8_kernels = make_table();

}  // namespace CKDIST_ISA
}  // namespace ckdist
