// What becomes of the sums of training's products, whatever made them. Private to isa/.
#pragma once
#include "kernels/isa/simd.h"
#include "kernels/product.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `lanes` sums of a token, from `column` on.
CKDIST_INLINE void finish(const ProductOutput& out, int64_t token, int64_t column, int lanes, Vec sum) {
  if (out.bias) sum = sum + load(out.bias + column);
  if (out.residual) sum = sum + load_n(out.residual + token * out.residual_stride + column, lanes);
  uint8_t* const row = out.at + token * out.stride;
  if (out.narrow) store_bf16(reinterpret_cast<uint16_t*>(row) + column, sum);
  else store(reinterpret_cast<float*>(row) + column, sum);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
