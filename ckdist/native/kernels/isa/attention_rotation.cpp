#include "kernels/isa/attention_rotation.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// A Hadamard matrix of 16 rows. Its upper left quarter is the matrix of 8 rows.
struct Signs {
  float rows[kLanes][kLanes];

  constexpr Signs() : rows() {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kLanes; ++j) rows[i][j] = __builtin_parity(i & j) ? -1.0f : 1.0f;
  }
};
constexpr Signs kSigns;

}  // namespace

void rotate_blocks(float* x, int width) {
  const int block = width & -width, least = block < kLanes ? block : kLanes;
  const Vec factor = set(1.0f / __builtin_sqrtf(static_cast<float>(block)));
  for (int i = 0; i < width; i += least) {
    Vec sum = set(0.0f);
    for (int j = 0; j < least; ++j) sum = fma(set(x[i + j]), load(kSigns.rows[j]), sum);
    store_n(x + i, sum * factor, least);
  }
  for (int step = kLanes; step < block; step *= 2)
    for (int i = 0; i < width; i += 2 * step)
      for (int j = i; j < i + step; j += kLanes) {
        const Vec a = load(x + j), b = load(x + j + step);
        store(x + j, a + b);
        store(x + j + step, a - b);
      }
}

void rotate_key(const CacheShape& cache, float* x) {
  const int first = cache.latent ? cache.value_width : cache.key_width;
  rotate_blocks(x, first);
  if (first < cache.key_width) rotate_blocks(x + first, cache.key_width - first);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
