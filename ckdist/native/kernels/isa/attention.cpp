#include "kernels/attention.h"

namespace ckdist {
namespace CKDIST_ISA {
extern const AttentionKernel attention_kernel = {};
}  // namespace CKDIST_ISA
}  // namespace ckdist
