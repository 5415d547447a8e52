#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace ckdist {

// Each ISA's object files define these in a namespace of the ISA's name.
#define CKDIST_DECLARE_ISA(isa)                      \
  namespace isa {                                    \
  extern const LinearKernel linear_kernels[kTypeCount]; \
  extern const AttentionKernel attention_kernel;     \
  extern const ElementwiseKernel elementwise_kernel; \
  extern const MachineKernel machine_kernel;         \
  extern const ReduceKernel reduce_kernel;           \
  extern const PackKernels pack_kernels;             \
  extern const GradientKernel gradient_kernel;       \
  }
CKDIST_DECLARE_ISA(baseline)
#ifdef CKDIST_HAVE_AVX2
CKDIST_DECLARE_ISA(avx2)
CKDIST_DECLARE_ISA(avx512)
#endif

namespace {

Kernels make(const char* name, const LinearKernel* linear, const AttentionKernel& attention, const ElementwiseKernel& elementwise,
             const MachineKernel& machine, const ReduceKernel& reduce, const PackKernels& pack, const GradientKernel& gradient) {
  Kernels k{name, {}, attention, elementwise, machine, reduce, pack, gradient};
  std::memcpy(k.linear, linear, sizeof k.linear);
  return k;
}
#define CKDIST_MAKE(isa)                                                                                                                     \
  make(#isa, isa::linear_kernels, isa::attention_kernel, isa::elementwise_kernel, isa::machine_kernel, isa::reduce_kernel, isa::pack_kernels, \
       isa::gradient_kernel)

bool cpu_has([[maybe_unused]] const char* isa) {
#ifdef CKDIST_HAVE_AVX2
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  if (!std::strcmp(isa, "avx2")) return avx2;
  if (!std::strcmp(isa, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
  return !std::strcmp(isa, "baseline");
}

const Kernels& choose() {
  const char* forced = std::getenv("CKDIST_ISA");
  if (forced)
    if (const Kernels* k = kernels_of(forced)) return *k;
  for (const char* isa : {"avx512", "avx2"})
    if (const Kernels* k = kernels_of(isa)) return *k;
  return *kernels_of("baseline");
}

}  // namespace

const Kernels* kernels_of(const char* isa) {
  if (!cpu_has(isa)) return nullptr;
#ifdef CKDIST_HAVE_AVX2
  static const Kernels avx512_kernels = CKDIST_MAKE(avx512);
  static const Kernels avx2_kernels = CKDIST_MAKE(avx2);
  if (!std::strcmp(isa, "avx512")) return &avx512_kernels;
  if (!std::strcmp(isa, "avx2")) return &avx2_kernels;
#endif
  static const Kernels baseline_kernels = CKDIST_MAKE(baseline);
  return !std::strcmp(isa, "baseline") ? &baseline_kernels : nullptr;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace ckdist
