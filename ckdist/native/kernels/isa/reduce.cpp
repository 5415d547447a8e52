#include "kernels/reduce.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {

namespace {

// 64 elements, the unit of folds.
constexpr int kVecs = 4, kBlock = kVecs * kLanes;
struct Block {
  Vec v[kVecs];
};

constexpr int64_t kLine = 64;
// Elements. From this size on, single elements are worth processing at the beginning, so that vectors do not cross
// cache lines.
constexpr int64_t kLong = 4096;

// Bytes from `p` to the next cache line.
CKDIST_INLINE int64_t to_line(const void* p) { return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % kLine); }

// Lanes of `a` if NaN, else of `b`.
CKDIST_INLINE Vec keep_nan(Vec a, Vec b) {
#if defined(__AVX512F__)
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), b.v, a.v)};
#elif defined(__AVX2__)
  CKDIST_EACH_PART(_mm256_blendv_ps(b.v[i], a.v[i], _mm256_cmp_ps(a.v[i], a.v[i], _CMP_UNORD_Q)));
#else
  CKDIST_EACH_PART((a.v[i] != a.v[i]) ? a.v[i] : b.v[i]);
#endif
}

template <ReduceOp op>
CKDIST_INLINE Vec combine(Vec a, Vec b) {
  if constexpr (op == ReduceOp::sum) return a + b;
  if constexpr (op == ReduceOp::max) return keep_nan(a, max(a, b));  // max and min return b if either is NaN
  return keep_nan(a, min(a, b));
}

CKDIST_INLINE uint16_t to_bf16_flushed(float x) {
  return bits_of_float(x) & 0x7f800000 ? bf16_of_float(x) : static_cast<uint16_t>(bits_of_float(x) >> 16 & 0x8000);
}

// The memory formats of types. Blocks are read, packed once, and stored to every destination.
struct F32 {
  using Value = float;
  using Packed = Block;
  CKDIST_INLINE Block read(const float* p) {
    Block block;
    for (int i = 0; i < kVecs; i++) block.v[i] = load(p + i * kLanes);
    return block;
  }
  CKDIST_INLINE Packed pack(const Block& block) { return block; }
  CKDIST_INLINE void write(float* p, const Packed& packed) {
    for (int i = 0; i < kVecs; i++) store(p + i * kLanes, packed.v[i]);
  }
  CKDIST_INLINE float narrow(float x) { return x; }
  CKDIST_INLINE float widen(float x) { return x; }
};

struct Halves {
  uint16_t bits[kBlock];
};

CKDIST_INLINE void write_halves(uint16_t* p, const Halves& h) { std::memcpy(p, h.bits, sizeof h.bits); }

struct BF16 {
  using Value = uint16_t;
  using Packed = Halves;
  CKDIST_INLINE Block read(const uint16_t* p) {
    Block block;
    for (int i = 0; i < kVecs; i++) block.v[i] = load_bf16(p + i * kLanes);
    return block;
  }
  CKDIST_INLINE Packed pack(const Block& block) {
    Packed packed;
    for (int i = 0; i < kVecs; i++) store_bf16(packed.bits + i * kLanes, flush(block.v[i]));
    return packed;
  }
  CKDIST_INLINE void write(uint16_t* p, const Packed& packed) { write_halves(p, packed); }
  CKDIST_INLINE uint16_t narrow(float x) { return to_bf16_flushed(x); }
  CKDIST_INLINE float widen(uint16_t x) { return float_of_bf16(x); }
};

// From bfloat16 to bfloat16 the order within a block is free: separating even and odd elements needs no shuffles.
// `flushed`: blocks hold no denormals.
template <bool flushed>
struct BF16Pairs : BF16 {
  struct Packed {
    Vec v[kVecs / 2];
  };
  CKDIST_INLINE Block read(const uint16_t* p) {
    Block block;
    for (int i = 0; i < kVecs; i += 2) load_pairs_bf16(p + i * kLanes, block.v + i, block.v + i + 1);
    return block;
  }
  CKDIST_INLINE Packed pack(const Block& block) {
    Packed packed;
    bool nan = false;
    for (int i = 0; i < kVecs; i += 2) nan |= any_nan(block.v[i], block.v[i + 1]);
    for (int i = 0; i < kVecs; i += 2)
      packed.v[i / 2] = __builtin_expect(nan, 0) ? to_bf16_pairs(flush(block.v[i]), flush(block.v[i + 1]))
                                                 : numbers_to_bf16_pairs<flushed>(block.v[i], block.v[i + 1]);
    return packed;
  }
  CKDIST_INLINE void write(uint16_t* p, const Packed& packed) {
    for (int i = 0; i < kVecs / 2; i++) store(reinterpret_cast<float*>(p) + i * kLanes, packed.v[i]);
  }
};

struct F16 {
  using Value = uint16_t;
  using Packed = Halves;
  CKDIST_INLINE Block read(const uint16_t* p) {
    Block block;
    for (int i = 0; i < kVecs; i++) block.v[i] = load_f16(p + i * kLanes);
    return block;
  }
  CKDIST_INLINE Packed pack(const Block& block) {
    Packed packed;
    for (int i = 0; i < kVecs; i++) store_f16(packed.bits + i * kLanes, block.v[i]);
    return packed;
  }
  CKDIST_INLINE void write(uint16_t* p, const Packed& packed) { write_halves(p, packed); }
  CKDIST_INLINE uint16_t narrow(float x) { return to_f16(x); }
  CKDIST_INLINE float widen(uint16_t x) { return from_f16(x); }
};

template <ReduceOp op>
CKDIST_INLINE float combine_one(float a, float b) {
  if constexpr (op == ReduceOp::sum) return a + b;
  if (a != a) return a;
  if constexpr (op == ReduceOp::max) return a > b ? a : b;
  return a < b ? a : b;
}

template <class In, class Out, ReduceOp op, int parts_known>
CKDIST_INLINE int64_t fold_blocks(typename Out::Value* const* outs, int out_count,
                                  const typename In::Value* const* parts, int part_count, int64_t i, int64_t n) {
  const int count = parts_known ? parts_known : part_count;
  for (; i + kBlock <= n; i += kBlock) {
    Block sum = In::read(parts[0] + i);
    for (int p = 1; p < count; p++) {
      const Block part = In::read(parts[p] + i);
      for (int v = 0; v < kVecs; v++) sum.v[v] = combine<op>(sum.v[v], part.v[v]);
    }
    const typename Out::Packed packed = Out::pack(sum);
    for (int o = 0; o < out_count; o++) Out::write(outs[o] + i, packed);
  }
  return i;
}

template <class In, class Out, ReduceOp op>
void fold(void* const* outs_in, int out_count, const void* const* parts_in, int part_count, int64_t n) {
  using From = typename In::Value;
  using To = typename Out::Value;
  const From* const* parts = reinterpret_cast<const From* const*>(parts_in);
  To* const* outs = reinterpret_cast<To* const*>(outs_in);
  if (n <= 0) return;
  int64_t i = 0;
  const auto fold_to = [&](int64_t end) {
    for (; i < end; i++) {
      float sum = In::widen(parts[0][i]);
      for (int p = 1; p < part_count; p++) sum = combine_one<op>(sum, In::widen(parts[p][i]));
      const To rounded = Out::narrow(sum);
      for (int o = 0; o < out_count; o++) outs[o][i] = rounded;
    }
  };
  if (n >= kLong) fold_to(to_line(outs[0]) / static_cast<int64_t>(sizeof(To)));
  i = part_count == 2 ? fold_blocks<In, Out, op, 2>(outs, out_count, parts, part_count, i, n)
                      : fold_blocks<In, Out, op, 0>(outs, out_count, parts, part_count, i, n);
  fold_to(n);
}

// Sums of bfloat16. Without the conversion instruction, the CPU's own flushing of denormal results is cheaper than
// ours.
template <ReduceOp op>
void fold_bf16(void* const* outs, int out_count, const void* const* parts, int part_count, int64_t n) {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
  if (op == ReduceOp::sum && part_count > 1) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON);
    fold<BF16Pairs<true>, BF16Pairs<true>, op>(outs, out_count, parts, part_count, n);
    _mm_setcsr(control);
    return;
  }
#endif
  fold<BF16Pairs<false>, BF16Pairs<false>, op>(outs, out_count, parts, part_count, n);
}

// Integers: sums are unsigned, so that they wrap.
template <class Int, class Unsigned, ReduceOp op>
void fold_ints(void* const* outs, int out_count, const void* const* parts, int part_count, int64_t n) {
  constexpr int64_t kChunk = 1024;
  Int sum[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t m = n - i < kChunk ? n - i : kChunk;
    std::memcpy(sum, static_cast<const Int*>(parts[0]) + i, m * sizeof(Int));
    for (int p = 1; p < part_count; p++) {
      const Int* x = static_cast<const Int*>(parts[p]) + i;
      for (int64_t j = 0; j < m; j++) {
        if constexpr (op == ReduceOp::sum)
          sum[j] = static_cast<Int>(static_cast<Unsigned>(static_cast<Unsigned>(sum[j]) + static_cast<Unsigned>(x[j])));
        else if constexpr (op == ReduceOp::max) sum[j] = sum[j] > x[j] ? sum[j] : x[j];
        else sum[j] = sum[j] < x[j] ? sum[j] : x[j];
      }
    }
    for (int o = 0; o < out_count; o++) std::memcpy(static_cast<Int*>(outs[o]) + i, sum, m * sizeof(Int));
  }
}

// Cache lines of any bytes. An array would be written to the stack as well.
static_assert(sizeof(Vec) == kLine);
CKDIST_INLINE Vec line_of(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
CKDIST_INLINE void write_line(uint8_t* p, Vec line) { store(reinterpret_cast<float*>(p), line); }

void exchange(void* out, void* line, const void* in, int64_t bytes) {
  uint8_t* const to = static_cast<uint8_t*>(out);
  uint8_t* const by = static_cast<uint8_t*>(line);
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const auto end = [&](int64_t i, int64_t n) {
    uint8_t was[kLine];
    std::memcpy(was, by + i, n);
    std::memcpy(by + i, from + i, n);
    std::memcpy(to + i, was, n);
  };
  int64_t i = bytes < to_line(line) ? bytes : to_line(line);
  if (i > 0) end(0, i);
  for (; i + kLine <= bytes; i += kLine) {
    const Vec was = line_of(by + i);
    write_line(by + i, line_of(from + i));
    write_line(to + i, was);
  }
  if (i < bytes) end(i, bytes - i);
}

void copy_twice(void* out, void* line, const void* in, int64_t bytes) {
  uint8_t* const to = static_cast<uint8_t*>(out);
  uint8_t* const by = static_cast<uint8_t*>(line);
  const uint8_t* const from = static_cast<const uint8_t*>(in);
  const auto end = [&](int64_t i, int64_t n) {
    std::memcpy(by + i, from + i, n);
    std::memmove(to + i, from + i, n);
  };
  int64_t i = bytes < to_line(line) ? bytes : to_line(line);
  if (i > 0) end(0, i);
  for (; i + kLine <= bytes; i += kLine) {
    const Vec read = line_of(from + i);
    write_line(by + i, read);
    write_line(to + i, read);
  }
  if (i < bytes) end(i, bytes - i);
}

void take(void* out, void* in, int64_t bytes) {
  uint8_t* to = static_cast<uint8_t*>(out);
  uint8_t* from = static_cast<uint8_t*>(in);
  int64_t i = bytes < to_line(in) ? bytes : to_line(in);
  if (i > 0) std::memcpy(to, from, i);
  for (; i + kLine <= bytes; i += kLine) {
    const Vec line = line_of(from + i);
    // The following store changes nothing but must not be removed.
    asm volatile("" ::: "memory");
    write_line(from + i, line);
    asm volatile("" ::: "memory");
    write_line(to + i, line);
  }
  if (i < bytes) std::memcpy(to + i, from + i, bytes - i);
}

#define CKDIST_OPS(function, ...) \
  {function<__VA_ARGS__, ReduceOp::sum>, function<__VA_ARGS__, ReduceOp::max>, function<__VA_ARGS__, ReduceOp::min>}

}  // namespace

extern const ReduceKernel reduce_kernel = {
    {CKDIST_OPS(fold, F32, F32),
     {fold_bf16<ReduceOp::sum>, fold_bf16<ReduceOp::max>, fold_bf16<ReduceOp::min>},
     CKDIST_OPS(fold, F16, F16),
     CKDIST_OPS(fold_ints, int32_t, uint32_t),
     CKDIST_OPS(fold_ints, int8_t, uint8_t)},
    {CKDIST_OPS(fold, F32, F32), CKDIST_OPS(fold, BF16, F32), CKDIST_OPS(fold, F16, F32),
     CKDIST_OPS(fold_ints, int32_t, uint32_t), CKDIST_OPS(fold_ints, int8_t, uint8_t)},
    {CKDIST_OPS(fold, F32, F32), CKDIST_OPS(fold, F32, BF16), CKDIST_OPS(fold, F32, F16),
     CKDIST_OPS(fold_ints, int32_t, uint32_t), CKDIST_OPS(fold_ints, int8_t, uint8_t)},
    take,
    exchange,
    copy_twice,
};

}  // namespace CKDIST_ISA
}  // namespace ckdist
