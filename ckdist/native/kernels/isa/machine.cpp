#include "kernels/machine.h"

#include "kernels/prefetch.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(CKDIST_NEON)
#include <arm_neon.h>
#endif
#ifdef __AMX_INT8__
#include "kernels/isa/tile.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

// Reads two places in turn, with the prefetching of products: this gives a core the highest bandwidth.
uint64_t read(const uint8_t* data, int64_t bytes) {
  constexpr int chunk = 16;  // lines
  Line sums[8] = {};
  const int64_t half = bytes / (2 * 64 * chunk) * chunk;  // lines
  const Line* const lines = reinterpret_cast<const Line*>(data);
  for (int64_t i = 0; i < half; i += chunk) {
    const Line* const at[2] = {lines + i, lines + half + i};
    for (int place = 0; weights_fetched && place < 2; place++)
      fetch_lines(reinterpret_cast<const uint8_t*>(at[place]) + kNear, chunk);
    for (int place = 0; place < 2; place++)
      for (int j = 0; j < chunk; j++) sums[j % 8] ^= at[place][j];
  }
  uint64_t all = 0;
  for (const Line& sum : sums)
    for (int k = 0; k < 8; k++) all ^= sum[k];
  return all;
}

// One kind of arithmetic: `step` adds a product to an accumulator. Each of its lanes counts as `kOps` operations.
#if defined(__AVX512F__)
constexpr int kChains = 24;  // sums in flight: hides the latency and fits the registers
struct F32 {
  using Vector = __m512;
  static constexpr int kOps = 32;
  static Vector operand() { return _mm512_set1_ps(1e-10f); }
  static void step(Vector& sum, Vector a, Vector b) { sum = _mm512_fmadd_ps(a, b, sum); }
};
#if defined(__AVX512BF16__)
struct Bf16 {
  using Vector = __m512;
  static constexpr int kOps = 64;
  static Vector operand() { return _mm512_set1_ps(1e-10f); }
  static void step(Vector& sum, Vector a, Vector b) { sum = _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(b)); }
};
#else
using Bf16 = F32;  // bfloat16 is expanded
#endif
struct Int8 {
  using Vector = __m512i;
  static constexpr int kOps = 128;
  static Vector operand() { return _mm512_set1_epi8(1); }
#if defined(__AVX512VNNI__)
  // Written by hand: GCC 12 copies and spills the sums of the intrinsic.
  static void step(Vector& sum, Vector a, Vector b) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
#else
  static void step(Vector& sum, Vector a, Vector b) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
  }  // as for most codes of up to 4 bits
#endif
};
#elif defined(__AVX2__)
constexpr int kChains = 12;
struct F32 {
  using Vector = __m256;
  static constexpr int kOps = 16;
  static Vector operand() { return _mm256_set1_ps(1e-10f); }
  static void step(Vector& sum, Vector a, Vector b) { sum = _mm256_fmadd_ps(a, b, sum); }
};
using Bf16 = F32;  // bfloat16 is expanded
struct Int8 {
  using Vector = __m256i;
  static constexpr int kOps = 64;
  static Vector operand() { return _mm256_set1_epi8(1); }
#if defined(__AVXVNNI__)
  static void step(Vector& sum, Vector a, Vector b) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#else
  static void step(Vector& sum, Vector a, Vector b) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
  }  // as for most codes of up to 4 bits
#endif
};
#elif defined(CKDIST_NEON)
constexpr int kChains = 24;
struct F32 {
  using Vector = float32x4_t;
  static constexpr int kOps = 8;
  static Vector operand() { return vdupq_n_f32(1e-10f); }
  static void step(Vector& sum, Vector a, Vector b) { sum = vfmaq_f32(sum, a, b); }
};
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct Bf16 {
  using Vector = float32x4_t;
  static constexpr int kOps = 32;
  static Vector operand() { return vdupq_n_f32(1e-10f); }
  static void step(Vector& sum, Vector a, Vector b) { sum = vbfmmlaq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
};
#else
using Bf16 = F32;  // bfloat16 is expanded
#endif
struct Int8 {
  using Vector = int32x4_t;
  static Vector operand() { return vreinterpretq_s32_s8(vdupq_n_s8(1)); }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int kOps = 64;
  static void step(Vector& sum, Vector a, Vector b) { sum = vmmlaq_s32(sum, (int8x16_t)a, (int8x16_t)b); }
#elif defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kOps = 32;
  static void step(Vector& sum, Vector a, Vector b) { sum = vdotq_s32(sum, (int8x16_t)a, (int8x16_t)b); }
#else
  static constexpr int kOps = 16;
  static void step(Vector& sum, Vector a, Vector b) {
    sum = (Vector)vmlal_s8((int16x8_t)sum, vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
  }
#endif
};
#else
constexpr int kChains = 8;
struct F32 {
  typedef float Vector __attribute__((vector_size(16)));
  static constexpr int kOps = 8;
  static Vector operand() { return Vector{} + 1e-10f; }
  static void step(Vector& sum, Vector a, Vector b) { sum += a * b; }
};
using Bf16 = F32;
struct Int8 {
  typedef int16_t Vector __attribute__((vector_size(16)));
  static constexpr int kOps = 16;
  static Vector operand() { return Vector{} + int16_t(1); }
  static void step(Vector& sum, Vector a, Vector b) { sum += a * b; }
};
#endif

#if defined(__x86_64__)
#define CKDIST_OPAQUE(v) asm volatile("" : "+x"(v))
#else
#define CKDIST_OPAQUE(v) asm volatile("" : "+w"(v))
#endif

template <class Kind>
int64_t chains(int64_t rounds, uint64_t* sink) {
  typename Kind::Vector sums[kChains], a = Kind::operand(), b = Kind::operand();
#pragma GCC unroll 32  // else the sums would be in memory
  for (int j = 0; j < kChains; j++) sums[j] = Kind::operand();
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 32
    for (int j = 0; j < kChains; j++) {
      CKDIST_OPAQUE(a);  // else the product would be moved out of the loop
      Kind::step(sums[j], a, b);
    }
  }
  typename Kind::Vector total = sums[0];
#pragma GCC unroll 32
  for (int j = 1; j < kChains; j++) total += sums[j];
  *sink ^= uint64_t(total[0]);
  return rounds * kChains * Kind::kOps;
}

#ifdef __AMX_INT8__
// Whole tiles, four tiles of sums as in products.
template <bool bytes, int sum, int a, int b>
inline void tile_step() {
  if constexpr (bytes) tile_dot_bytes<sum, a, b>();
  else tile_dot_bf16<sum, a, b>();
}

template <bool bytes>
int64_t tile_chains(int64_t rounds, uint64_t* sink) {
  TileShapes shapes;
  for (int tile = 0; tile < kTiles; tile++) shapes.set(tile, kTileMostRows, kTileRowBytes);
  tile_configure(shapes);  // zeroes the tiles
  for (int64_t r = 0; r < rounds; r++) {
    tile_step<bytes, 0, 4, 6>();
    tile_step<bytes, 1, 4, 7>();
    tile_step<bytes, 2, 5, 6>();
    tile_step<bytes, 3, 5, 7>();
  }
  uint64_t sums[kTileMostRows * kTileRowBytes / sizeof(uint64_t)];
  tile_store<3>(sums, kTileRowBytes);
  *sink ^= sums[0];
  tile_release();
  return rounds * 4 * 2 * kTileMostRows * (kTileRowBytes / 4) * (kTileRowBytes / (bytes ? 1 : 2));
}
#endif

int64_t multiply_add(ActivationFormat format, int64_t rounds, uint64_t* sink) {
#ifdef __AMX_INT8__
  if (format != ActivationFormat::f32)
    return format == ActivationFormat::bf16 ? tile_chains<false>(rounds, sink) : tile_chains<true>(rounds, sink);
#endif
  switch (format) {
    case ActivationFormat::f32: return chains<F32>(rounds, sink);
    case ActivationFormat::bf16: return chains<Bf16>(rounds, sink);
    default: return chains<Int8>(rounds, sink);
  }
}

}  // namespace

extern const MachineKernel machine_kernel = {read, multiply_add};

}  // namespace CKDIST_ISA
}  // namespace ckdist
