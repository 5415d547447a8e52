// The row of a weight type in a level's table of products, made of the strips of the level. Private to isa/.
#pragma once
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include "kernels/isa/prompt_panels.h"
#elif defined(__AVX512F__)
#include "kernels/isa/linear_avx512.h"
#elif defined(__AVX2__)
#include "kernels/isa/linear_winograd.h"
#elif defined(CKDIST_NEON)
#include "kernels/isa/linear_neon.h"
#else
#include "kernels/isa/linear_baseline.h"
#endif
#include "kernels/isa/pack_tile.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

template <Type type>
constexpr LinearKernel kernel_of() {
  LinearKernel kernel = {activation_format(kFormats, type),
                         Tiles<type>::tile_bytes,
                         CKDIST_VECTORS::pack_tile<type>,
                         Tiles<type>::unpack_row,
                         nullptr,
                         prompt_format(kFormats, type),
                         nullptr};
#ifdef __AMX_INT8__
  kernel.multiply = multiply_in_tiles<type>;
  if constexpr (prompt_format(kFormats, type) == ActivationFormat::bf16) kernel.multiply_prompt = multiply_prompt<type>;
#elif defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (in_pairs<type>()) kernel.multiply = multiply_in_panels<type>;
  else kernel.multiply = multiply<Product<type>>;
#else
  kernel.multiply = multiply<Product<type>>;
#endif
  return kernel;
}

// The rows of the types that EACH_TYPE lists.
#define CKDIST_KERNEL_ROW(name) table.of[static_cast<int>(Type::name)] = kernel_of<Type::name>();
#define CKDIST_KERNEL_TABLE(EACH_TYPE) \
  [] {                                 \
    KernelTable table = {};            \
    EACH_TYPE(CKDIST_KERNEL_ROW)       \
    return table;                      \
  }()

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
