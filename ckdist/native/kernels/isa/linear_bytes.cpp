// Products of the types whose codes are stored in column order and multiplied as bytes. They need the dot product of
// bytes.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {

constexpr KernelTable table = CKDIST_KERNEL_TABLE(CKDIST_EACH_ORDERED_TYPE);
extern const KernelTable ordered_kernels = table;

}  // namespace CKDIST_ISA
}  // namespace ckdist
