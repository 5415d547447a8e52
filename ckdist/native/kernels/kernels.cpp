#include "kernels/kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "core/error.h"
#include "kernels/prefetch.h"

#ifdef __x86_64__
#include <cpuid.h>

#include "core/numa.h"
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ckdist {

#if defined(__x86_64__)
namespace {
bool is_zen5() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &a, &b, &c, &d);
  return __builtin_cpu_is("amd") && (a >> 8 & 15) + (a >> 20 & 255) >= 0x1a;  // the family
}
}  // namespace
const bool weights_fetched = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
const bool codes_fetched = is_zen5();
#else
const bool weights_fetched = false, codes_fetched = false;
#endif

// The object files of each level define these in a namespace of the level's name: functions that need only vectors, the
// dot product of bytes, or the dot product of bfloat16.
#define CKDIST_DECLARE_VECTORS(isa)                       \
  namespace isa {                                         \
  extern const LinearKernel f32_kernel, f16_kernel;       \
  extern const ProductKernel f32_product;                 \
  extern const ElementwiseKernel elementwise_kernel;      \
  extern const OptimizerKernel optimizer_kernel;          \
  extern const GradientKernel gradient_kernel;            \
  extern const QuantizeKernel quantize_kernel;            \
  extern const DeltaRuleKernel delta_rule_kernel;         \
  extern const StateGradientKernel state_gradient_kernel; \
  extern const LowRankKernel low_rank_kernel;             \
  }
#define CKDIST_DECLARE_BYTES(isa)                                \
  namespace isa {                                                \
  extern const KernelTable ordered_kernels, interleaved_kernels; \
  extern const AttentionKernel attention_kernel;                 \
  extern const MachineKernel machine_kernel;                     \
  }
#define CKDIST_DECLARE_BF16(isa)             \
  namespace isa {                            \
  extern const LinearKernel bf16_kernel;     \
  extern const KernelTable float8_kernels;   \
  extern const ProductKernel bf16_product;   \
  extern const ReduceKernel reduce_kernel;   \
  extern const PackKernels pack_kernels;     \
  extern const RowKernel row_kernel;         \
  extern const SoftmaxKernel softmax_kernel; \
  extern const MachineKernel machine_kernel; \
  }
#define CKDIST_DECLARE_ALL(isa) CKDIST_DECLARE_VECTORS(isa) CKDIST_DECLARE_BYTES(isa) CKDIST_DECLARE_BF16(isa)

CKDIST_DECLARE_ALL(baseline)
CKDIST_DECLARE_ALL(avx2)
CKDIST_DECLARE_ALL(avx512)
CKDIST_DECLARE_BYTES(avx2_vnni)
CKDIST_DECLARE_BYTES(avx512_vnni)
CKDIST_DECLARE_BF16(avx512_bf16)
CKDIST_DECLARE_BYTES(amx)
CKDIST_DECLARE_BF16(amx)
CKDIST_DECLARE_ALL(neon)
CKDIST_DECLARE_BYTES(neon_dotprod)
CKDIST_DECLARE_BYTES(neon_i8mm)
CKDIST_DECLARE_BF16(neon_bf16)

namespace {

// The kernels of level `isa` from those of three levels. `peak` is the level with the arithmetic of `isa`.
#define CKDIST_MAKE(isa, vectors, bytes, bf16, peak)                                                 \
  make({#isa,                                                                                        \
        {},                                                                                          \
        bytes::attention_kernel,                                                                     \
        vectors::elementwise_kernel,                                                                 \
        peak::machine_kernel,                                                                        \
        bf16::reduce_kernel,                                                                         \
        vectors::optimizer_kernel,                                                                   \
        bf16::pack_kernels,                                                                          \
        {vectors::f32_product, bf16::bf16_product},                                                  \
        vectors::gradient_kernel,                                                                    \
        bf16::row_kernel,                                                                            \
        bf16::softmax_kernel,                                                                        \
        vectors::quantize_kernel,                                                                    \
        vectors::delta_rule_kernel,                                                                  \
        vectors::state_gradient_kernel,                                                              \
        vectors::low_rank_kernel},                                                                   \
       bytes::ordered_kernels, bytes::interleaved_kernels, vectors::f32_kernel, vectors::f16_kernel, \
       bf16::bf16_kernel, bf16::float8_kernels)

// Replaces the kernels in `k` by those of each type in `table`.
void take(Kernels& k, const KernelTable& table) {
  for (int type = 0; type < kTypeCount; type++)
    if (table.of[type].multiply) k.linear[type] = table.of[type];
}

Kernels make(Kernels k, const KernelTable& ordered, const KernelTable& interleaved, const LinearKernel& f32,
             const LinearKernel& f16, const LinearKernel& bf16, const KernelTable& float8) {
  take(k, ordered);
  take(k, interleaved);
  take(k, float8);
  k.linear[static_cast<int>(Type::f32)] = f32;
  k.linear[static_cast<int>(Type::f16)] = f16;
  k.linear[static_cast<int>(Type::bf16)] = bf16;
  return k;
}

#ifdef __x86_64__

[[maybe_unused]] bool has_leaf_7_1(unsigned bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}

#ifdef CKDIST_TILE_MODEL  // a build for tests, whose tiles are a model
constexpr bool kTileModel = true;
#else
constexpr bool kTileModel = false;
#endif

// True if tiles have the shape that the kernels require.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  // Palette 1: bytes of a tile in EAX's upper half; bytes of a row and tiles in EBX's halves; rows in ECX's lower half.
  return __get_cpuid_count(0x1d, 1, &a, &b, &c, &d) && a >> 16 >= 1024 && (b & 0xffff) >= 64 && b >> 16 >= 8 &&
         (c & 0xffff) >= 16;
}
bool has_amx(unsigned bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return kTileModel || (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> bit & 1) && has_tiles());
}
// True if the system saves the state of tiles and allows this process to use them: XCR0, bits 17 and 18, tile
// configuration and data.
[[maybe_unused]] bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0, state = 0, high = 0;
  if (!has_amx(24) || !__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
  asm volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  return (state >> 17 & 3) == 3 && request_amx() == 1;
}

#endif

// A CPU feature that a level needs, with its name in /proc/cpuinfo, and whether the CPU has it.
struct Flag {
  const char* name;
  bool there;
};

[[maybe_unused]] std::string lacking(std::initializer_list<Flag> flags) {
  std::string names;
  for (const Flag& flag : flags)
    if (!flag.there) names += (names.empty() ? "" : " ") + std::string(flag.name);
  return names;
}

// Best first, like all lists here.
#ifdef __x86_64__
void add_x86_levels([[maybe_unused]] std::vector<Level>& levels) {
  __builtin_cpu_init();
  [[maybe_unused]] const std::string avx2 = lacking({{"avx2", __builtin_cpu_supports("avx2") != 0},
                                                     {"fma", __builtin_cpu_supports("fma") != 0},
                                                     {"f16c", __builtin_cpu_supports("f16c") != 0},
                                                     {"bmi2", __builtin_cpu_supports("bmi2") != 0}});
  const std::string wide = lacking({{"avx512f", __builtin_cpu_supports("avx512f") != 0},
                                    {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
                                    {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
                                    {"avx512dq", __builtin_cpu_supports("avx512dq") != 0}});
  [[maybe_unused]] const auto both = [](const std::string& a, const std::string& b) {
    return a.empty() || b.empty() ? a + b : a + " " + b;
  };
  [[maybe_unused]] const std::string avx512 = both(avx2, wide);
  [[maybe_unused]] const std::string vnni =
      both(avx512, lacking({{"avx512_vnni", __builtin_cpu_supports("avx512vnni") != 0}}));
  [[maybe_unused]] const std::string bf16 = both(vnni, lacking({{"avx512_bf16", has_leaf_7_1(5)}}));
#ifdef CKDIST_HAVE_AMX
  static const Kernels of_amx = [] {
    Kernels k = CKDIST_MAKE(amx, avx512, avx512_vnni, avx512_bf16, amx);
    take(k, amx::ordered_kernels);
    take(k, amx::interleaved_kernels);
    k.linear[static_cast<int>(Type::bf16)] = amx::bf16_kernel;
    take(k, amx::float8_kernels);
    k.product.bf16 = amx::bf16_product;
    k.attention = amx::attention_kernel;
    return k;
  }();
  std::string tiles = both(bf16, lacking({{"avx512vbmi", __builtin_cpu_supports("avx512vbmi") != 0},
                                          {"amx_tile", has_amx(24)},
                                          {"amx_int8", has_amx(25)},
                                          {"amx_bf16", has_amx(22)}}));
  if (tiles.empty() && !kTileModel && !may_use_tiles()) tiles = "the kernel's permission to use tiles";
  levels.push_back({&of_amx, tiles});
#endif
#ifdef CKDIST_HAVE_AVX512_BF16
  static const Kernels of_bf16 = CKDIST_MAKE(avx512_bf16, avx512, avx512_vnni, avx512_bf16, avx512_bf16);
  levels.push_back({&of_bf16, bf16});
#endif
#ifdef CKDIST_HAVE_AVX512_VNNI
  static const Kernels of_vnni = CKDIST_MAKE(avx512_vnni, avx512, avx512_vnni, avx512, avx512_vnni);
  levels.push_back({&of_vnni, vnni});
#endif
#ifdef CKDIST_HAVE_AVX512
  static const Kernels of_avx512 = CKDIST_MAKE(avx512, avx512, avx512, avx512, avx512);
  levels.push_back({&of_avx512, avx512});
#endif
#ifdef CKDIST_HAVE_AVX2_VNNI
  static const Kernels of_avx2_vnni = CKDIST_MAKE(avx2_vnni, avx2, avx2_vnni, avx2, avx2_vnni);
  levels.push_back({&of_avx2_vnni, both(avx2, lacking({{"avx_vnni", has_leaf_7_1(4)}}))});
#endif
#ifdef CKDIST_HAVE_AVX2
  static const Kernels of_avx2 = CKDIST_MAKE(avx2, avx2, avx2, avx2, avx2);
  levels.push_back({&of_avx2, avx2});
#endif
}
#endif

#ifdef __aarch64__
void add_arm_levels(std::vector<Level>& levels) {
  const unsigned long has = getauxval(AT_HWCAP), has_more = getauxval(AT_HWCAP2);
  [[maybe_unused]] const Flag dotprod = {"asimddp", (has & HWCAP_ASIMDDP) != 0};
  [[maybe_unused]] const Flag i8mm = {"i8mm", (has_more & HWCAP2_I8MM) != 0};
  [[maybe_unused]] const Flag bf16 = {"bf16", (has_more & HWCAP2_BF16) != 0};
#ifdef CKDIST_HAVE_NEON_BF16
  static const Kernels of_neon_bf16 = CKDIST_MAKE(neon_bf16, neon, neon_i8mm, neon_bf16, neon_bf16);
  levels.push_back({&of_neon_bf16, lacking({dotprod, i8mm, bf16})});
#endif
#ifdef CKDIST_HAVE_NEON_I8MM
  static const Kernels of_neon_i8mm = CKDIST_MAKE(neon_i8mm, neon, neon_i8mm, neon, neon_i8mm);
  levels.push_back({&of_neon_i8mm, lacking({dotprod, i8mm})});
#endif
#ifdef CKDIST_HAVE_NEON_DOTPROD
  static const Kernels of_neon_dotprod = CKDIST_MAKE(neon_dotprod, neon, neon_dotprod, neon, neon_dotprod);
  levels.push_back({&of_neon_dotprod, lacking({dotprod})});
#endif
#ifdef CKDIST_HAVE_NEON
  static const Kernels of_neon = CKDIST_MAKE(neon, neon, neon, neon, neon);
  levels.push_back({&of_neon, ""});
#endif
}
#endif

std::vector<Level> find_levels() {
  std::vector<Level> levels;
#ifdef __x86_64__
  add_x86_levels(levels);
#endif
#ifdef __aarch64__
  add_arm_levels(levels);
#endif
#ifdef CKDIST_HAVE_BASELINE
  static const Kernels of_baseline = CKDIST_MAKE(baseline, baseline, baseline, baseline, baseline);
  levels.push_back({&of_baseline, ""});
#endif
  return levels;
}

const Kernels& choose() {
  if (const char* forced = std::getenv("CKDIST_ISA")) return kernels_named(forced);
  for (const Level& level : levels())
    if (level.lacks.empty()) return *level.kernels;
  const Level& only = levels().back();  // every other kind of build has the baseline
  fail(Status::config,
       "this build is for %s, which needs %s, which this CPU lacks; make native LEVELS=all serves others",
       only.kernels->name, only.lacks.c_str());
}

std::atomic<const Kernels*>& chosen_kernels() {
  static std::atomic<const Kernels*> chosen{&choose()};
  return chosen;
}

}  // namespace

const std::vector<Level>& levels() {
  static const std::vector<Level> all = find_levels();
  return all;
}

const Kernels& kernels_named(const char* isa) {
  std::string here, lacks;
  for (const Level& level : levels()) {
    if (level.lacks.empty() && !std::strcmp(level.kernels->name, isa)) return *level.kernels;
    if (level.lacks.empty()) here += (here.empty() ? "" : ", ") + std::string(level.kernels->name);
    else if (!std::strcmp(level.kernels->name, isa)) lacks = level.lacks;
  }
  if (lacks.empty())
    fail(Status::config, "ISA %.32s is not known to this build; use one of %s, or build others: make native LEVELS=all",
         isa, here.c_str());
  fail(Status::config, "ISA %.32s needs %s, which this CPU lacks; use one of %s", isa, lacks.c_str(), here.c_str());
}

const Kernels& kernels() { return *chosen_kernels().load(std::memory_order_acquire); }

void use_kernels(const char* isa) { chosen_kernels().store(&kernels_named(isa), std::memory_order_release); }

}  // namespace ckdist
