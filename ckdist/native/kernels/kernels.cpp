#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>

namespace ckdist {

#define CKDIST_DECLARE_ISA(isa)            \
  namespace isa {                          \
  extern const LinearKernel* linear_table; \
  extern const AttentionKernel attention;  \
  extern const ElementwiseKernel elementwise; \
  }
CKDIST_DECLARE_ISA(baseline)
#ifdef CKDIST_HAVE_AVX2
CKDIST_DECLARE_ISA(avx2)
CKDIST_DECLARE_ISA(avx512)
#endif

namespace {

template <class Fill>
Kernels make(const char* name, const LinearKernel* linear, const AttentionKernel& attention, const ElementwiseKernel& elementwise, Fill) {
  Kernels k;
  k.name = name;
  std::memcpy(k.linear, linear, sizeof k.linear);
  k.attention = attention;
  k.elementwise = elementwise;
  return k;
}

}  // namespace
}  // namespace ckdist
