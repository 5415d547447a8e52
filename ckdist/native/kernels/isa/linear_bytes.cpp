// Products of the types whose codes are stored in column order and multiplied as bytes. They need the dot product of
// bytes.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr KernelTable all_kernels() {
  KernelTable table = {};
#define CKDIST_KERNEL(name) table.of[static_cast<int>(Type::name)] = kernel_of<Type::name>();
  CKDIST_EACH_ORDERED_TYPE(CKDIST_KERNEL)
#undef CKDIST_KERNEL
  return table;
}

}  // namespace

extern const KernelTable ordered_kernels = all_kernels();

}  // namespace CKDIST_ISA
}  // namespace ckdist
