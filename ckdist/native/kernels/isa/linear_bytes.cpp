// Products of the block-quantised types, one row each: they ask for the dot product of bytes.
#include "kernels/isa/linear_rows.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr LinearKernel none = {};

}  // namespace

extern const LinearKernel byte_kernels[kTypeCount] = {none,
                                                      none,
                                                      kernel_of<Type::q4_0>(),
                                                      kernel_of<Type::q4_1>(),
                                                      none,
                                                      none,
                                                      kernel_of<Type::q5_0>(),
                                                      kernel_of<Type::q5_1>(),
                                                      kernel_of<Type::q8_0>(),
                                                      none,
                                                      kernel_of<Type::q2_k>(),
                                                      kernel_of<Type::q3_k>(),
                                                      kernel_of<Type::q4_k>(),
                                                      kernel_of<Type::q5_k>(),
                                                      kernel_of<Type::q6_k>(),
                                                      none,
                                                      kernel_of<Type::iq2_xxs>(),
                                                      kernel_of<Type::iq2_xs>(),
                                                      kernel_of<Type::iq3_xxs>(),
                                                      kernel_of<Type::iq1_s>(),
                                                      kernel_of<Type::iq4_nl>(),
                                                      kernel_of<Type::iq3_s>(),
                                                      kernel_of<Type::iq2_s>(),
                                                      kernel_of<Type::iq4_xs>(),
                                                      none,
                                                      none,
                                                      none,
                                                      none,
                                                      none,
                                                      kernel_of<Type::iq1_m>(),
                                                      none,
                                                      none,
                                                      none,
                                                      none,
                                                      kernel_of<Type::tq1_0>(),
                                                      kernel_of<Type::tq2_0>(),
                                                      none,
                                                      none,
                                                      none,
                                                      kernel_of<Type::mxfp4>()};

}  // namespace CKDIST_ISA
}  // namespace ckdist
