// Products of the types whose codes are stored interleaved and multiplied as bytes. They need the dot product of bytes.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {

constexpr KernelTable table = CKDIST_KERNEL_TABLE(CKDIST_EACH_INTERLEAVED_TYPE);
extern const KernelTable interleaved_kernels = table;

}  // namespace CKDIST_ISA
}  // namespace ckdist
