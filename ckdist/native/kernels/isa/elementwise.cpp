#include "kernels/elementwise.h"

namespace ckdist {
namespace CKDIST_ISA {
extern const ElementwiseKernel elementwise_kernel = {};
}  // namespace CKDIST_ISA
}  // namespace ckdist
