#include "kernels/linear.h"

namespace ckdist {
namespace CKDIST_ISA {
extern const LinearKernel linear_kernels[kTypeCount] = {};
}  // namespace CKDIST_ISA
}  // namespace ckdist
