#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifdef CKDIST_HAVE_AMX
#include <cpuid.h>

#include "core/numa.h"
#endif

namespace ckdist {

// Each ISA's object files define these in a namespace of the ISA's name.
#define CKDIST_DECLARE_ISA(isa)                      \
  namespace isa {                                    \
  extern const LinearKernel linear_kernels[kTypeCount]; \
  extern const AttentionKernel attention_kernel;     \
  extern const ElementwiseKernel elementwise_kernel; \
  extern const MachineKernel machine_kernel;         \
  extern const ReduceKernel reduce_kernel;           \
  extern const OptimizerKernel optimizer_kernel;     \
  extern const PackKernels pack_kernels;             \
  extern const ProductKernels product_kernels;       \
  extern const GradientKernel gradient_kernel;       \
  extern const RowKernel row_kernel;                 \
  extern const SoftmaxKernel softmax_kernel;         \
  extern const QuantizeKernel quantize_kernel;       \
  }
CKDIST_DECLARE_ISA(baseline)
#ifdef CKDIST_HAVE_AVX2
CKDIST_DECLARE_ISA(avx2)
CKDIST_DECLARE_ISA(avx512)
#endif
#ifdef CKDIST_HAVE_AMX
namespace amx {
extern const LinearKernel linear_kernels[kTypeCount];
extern const ProductKernels product_kernels;
extern const MachineKernel machine_kernel;
}
#endif

namespace {

Kernels make(const char* name, const LinearKernel* linear, const AttentionKernel& attention, const ElementwiseKernel& elementwise,
             const MachineKernel& machine, const ReduceKernel& reduce, const OptimizerKernel& optimizer, const PackKernels& pack,
             const ProductKernels& product, const GradientKernel& gradient, const RowKernel& row, const SoftmaxKernel& softmax,
             const QuantizeKernel& quantize) {
  Kernels k{name, {}, attention, elementwise, machine, reduce, optimizer, pack, product, gradient, row, softmax, quantize};
  std::memcpy(k.linear, linear, sizeof k.linear);
  return k;
}
#define CKDIST_MAKE(isa)                                                                                                                         \
  make(#isa, isa::linear_kernels, isa::attention_kernel, isa::elementwise_kernel, isa::machine_kernel, isa::reduce_kernel, isa::optimizer_kernel, \
       isa::pack_kernels, isa::product_kernels, isa::gradient_kernel, isa::row_kernel, isa::softmax_kernel, isa::quantize_kernel)

#ifdef CKDIST_HAVE_AMX
// Tiles of the shape that the kernels take for granted, whose state the kernel saves and lets this process use.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned saves = 1u << 27, bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;  // OSXSAVE; CPUID.7.0:EDX
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & saves)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
  // Palette 1: bytes of a tile in EAX's upper half; bytes of a row and tiles in EBX's halves; rows in ECX's lower half.
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || a >> 16 < 1024 || (b & 0xffff) < 64 || b >> 16 < 8 || (c & 0xffff) < 16) return false;
  unsigned state = 0, high = 0;
  asm volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));  // XCR0, bits 17 and 18: tile configuration and data
  return (state >> 17 & 3) == 3 && request_amx() == 1;
}
#endif

bool cpu_has([[maybe_unused]] const char* isa) {
#ifdef CKDIST_HAVE_AVX2
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  if (!std::strcmp(isa, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(isa, "avx512")) return avx512;
#endif
#ifdef CKDIST_HAVE_AMX
  if (!std::strcmp(isa, "amx")) {
    static const bool amx = avx512 && has_tiles();
    return amx;
  }
#endif
  return !std::strcmp(isa, "baseline");
}

const Kernels& choose() {
  const char* forced = std::getenv("CKDIST_ISA");
  if (forced)
    if (const Kernels* k = kernels_of(forced)) return *k;
  for (const char* isa : {"amx", "avx512", "avx2"})
    if (const Kernels* k = kernels_of(isa)) return *k;
  return *kernels_of("baseline");
}

}  // namespace

const Kernels* kernels_of(const char* isa) {
  if (!cpu_has(isa)) return nullptr;
#ifdef CKDIST_HAVE_AMX
  static const Kernels amx_kernels =  // AVX-512 but for products
      make("amx", amx::linear_kernels, avx512::attention_kernel, avx512::elementwise_kernel, amx::machine_kernel, avx512::reduce_kernel, avx512::optimizer_kernel,
           avx512::pack_kernels, ProductKernels{avx512::product_kernels.f32, amx::product_kernels.bf16}, avx512::gradient_kernel,
           avx512::row_kernel, avx512::softmax_kernel, avx512::quantize_kernel);
  if (!std::strcmp(isa, "amx")) return &amx_kernels;
#endif
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
