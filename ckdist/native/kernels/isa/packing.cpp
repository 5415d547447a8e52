// Packing and turning of floats in blocks of 16 x 16 words. A word is one float, or two bfloat16 that lie side by side.
#include "kernels/packing.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__)

typedef __m512i Words;

CKDIST_INLINE Words no_words() { return _mm512_setzero_si512(); }
CKDIST_INLINE void store_words(uint8_t* p, Words a) { _mm512_storeu_si512(p, a); }
CKDIST_INLINE void store_words(uint8_t* p, Words a, int n) { _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), a); }
CKDIST_INLINE Vec load_some(const float* p, int64_t n) { return n >= kLanes ? load(p) : n > 0 ? load_n(p, static_cast<int>(n)) : set(0.0f); }

template <bool bf16>
CKDIST_INLINE Words along(const float* p, int64_t n) {
  if constexpr (!bf16) return _mm512_castps_si512(load_some(p, n).v);
  return to_bf16(load_some(p, n), load_some(p + kLanes, n - kLanes));
}
template <bool bf16>
CKDIST_INLINE Words along(const uint16_t* p, int64_t n) {
  return n >= 32 ? _mm512_loadu_si512(p) : n > 0 ? _mm512_maskz_loadu_epi16((1u << n) - 1, p) : no_words();
}
CKDIST_INLINE Words widened(const float* p, int64_t n) {
  return _mm512_cvtepu16_epi32(to_bf16(load_some(p, n)));
}
CKDIST_INLINE Words widened(const uint16_t* p, int64_t n) {
  const __mmask16 some = static_cast<__mmask16>((1u << (n < kLanes ? n : kLanes)) - 1);
  return _mm512_cvtepu16_epi32(n >= kLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi16(some, p));
}
// Of two rows, element by element.
template <class Element>
CKDIST_INLINE Words across(const Element* p, const Element* q, int64_t n) {
  const __m512i low = widened(p, n);
  return q ? _mm512_or_si512(low, _mm512_slli_epi32(widened(q, n), 16)) : low;
}

CKDIST_INLINE void turn_words(Words* r) {
  Words t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

#else

struct Words { uint32_t w[kLanes]; };

CKDIST_INLINE Words no_words() { return Words{}; }
CKDIST_INLINE void store_words(uint8_t* p, const Words& a) { std::memcpy(p, a.w, sizeof a.w); }
CKDIST_INLINE void store_words(uint8_t* p, const Words& a, int n) { std::memcpy(p, a.w, 4 * static_cast<size_t>(n)); }

template <bool bf16>
CKDIST_INLINE Words along(const float* p, int64_t n) {
  Words out{};
  if (bf16)
    for (int64_t i = 0; i < least(n, 2 * kLanes); ++i) out.w[i / 2] |= static_cast<uint32_t>(to_bf16(p[i])) << (i % 2 * 16);
  else
    std::memcpy(out.w, p, 4 * static_cast<size_t>(n > 0 ? least(n, kLanes) : 0));
  return out;
}
template <bool bf16>
CKDIST_INLINE Words along(const uint16_t* p, int64_t n) {
  Words out{};
  std::memcpy(out.w, p, 2 * static_cast<size_t>(n > 0 ? least(n, 2 * kLanes) : 0));
  return out;
}
CKDIST_INLINE uint32_t rounded(float x) { return to_bf16(x); }
CKDIST_INLINE uint32_t rounded(uint16_t x) { return x; }
template <class Element>
CKDIST_INLINE Words across(const Element* p, const Element* q, int64_t n) {
  Words out{};
  for (int64_t i = 0; i < least(n, kLanes); ++i) out.w[i] = rounded(p[i]) | (q ? rounded(q[i]) << 16 : 0);
  return out;
}
CKDIST_INLINE void turn_words(Words* r) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t w = r[i].w[j];
      r[i].w[j] = r[j].w[i], r[j].w[i] = w;
    }
}

#endif

// Word i of what `unit` rows from x on hold in n columns; rows beyond `left` are zeros.
template <bool bf16, class Element>
CKDIST_INLINE Words row_words(const Element* x, int64_t stride, int64_t left, int64_t n) {
  if (left <= 0) return no_words();
  if constexpr (bf16) return across(x, left > 1 ? x + stride : nullptr, n);
  else return along<false>(x, n);
}

// Floats are weights, which come from memory: those of the next tile, and those of a few rows ahead, are fetched to the L2 cache meanwhile.
constexpr int64_t kFetchRows = 32;
CKDIST_INLINE void fetch(const float* p, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * kLanes, 0, 2);
}
CKDIST_INLINE void fetch(const uint16_t*, int) {}

template <bool bf16, class Element>
void pack_rows(const Element* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  constexpr int unit = bf16 ? 2 : 1;
  const int64_t words = (cols + 15) / 16 * 16 / unit;
  for (int64_t w = 0; w < words; w += 16) {
    Words block[16];
    for (int r = 0; r < 16; ++r) {
      block[r] = r < rows ? along<bf16>(x + r * stride + w * unit, cols - w * unit) : no_words();
      fetch(x + (r + 16) * stride + w * unit, unit);
    }
    turn_words(block);
    for (int j = 0; j < least(16, words - w); ++j) store_words(tile + (w + j) * 64, block[j]);
  }
}

template <bool bf16, class Element>
void pack_columns(const Element* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  constexpr int unit = bf16 ? 2 : 1;
  const int64_t padded = (cols + 15) / 16 * 16;
  for (int64_t c = 0; c < padded; c += unit, tile += 64) {
    for (int i = 0; i < unit; ++i) fetch(x + (c + kFetchRows + i) * stride, 1);
    store_words(tile, row_words<bf16>(x + c * stride, stride, cols - c, rows));
  }
}

template <bool bf16>
void convert(const float* x, int64_t n, int64_t padded, uint8_t* out) {
  constexpr int unit = bf16 ? 2 : 1;
  const int64_t words = padded / unit;
  for (int64_t w = 0; w < words; w += 16) {
    const Words value = along<bf16>(x + w * unit, n - w * unit);
    if (words - w >= 16) store_words(out + 4 * w, value);
    else store_words(out + 4 * w, value, static_cast<int>(words - w));
  }
}

template <bool bf16>
void widen(const uint8_t* x, int64_t n, float* out) {
  if constexpr (!bf16) {
    std::memcpy(out, x, 4 * static_cast<size_t>(n));
  } else {
    const uint16_t* const p = reinterpret_cast<const uint16_t*>(x);
    int64_t i = 0;
    for (; n - i >= kLanes; i += kLanes) store(out + i, load_bf16(p + i));
    for (; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(p[i]) << 16);
  }
}

template <bool bf16>
struct Operand { using Element = float; };
template <>
struct Operand<true> { using Element = uint16_t; };

template <bool bf16>
void operand_rows(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  using Element = typename Operand<bf16>::Element;
  pack_rows<bf16>(reinterpret_cast<const Element*>(x), stride / int64_t{sizeof(Element)}, rows, cols, tile);
}
template <bool bf16>
void operand_columns(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tiles, int64_t tile_bytes) {
  using Element = typename Operand<bf16>::Element;
#if defined(__AVX512F__)
  if (bf16 && rows == 2 * kTileRows) {  // whole cache lines, two of them interleaved
    const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t c = 0; c < (cols + 15) / 16 * 16; c += 2, tiles += 64) {
      const Words a = c < cols ? _mm512_loadu_si512(x + c * stride) : no_words(), b = c + 1 < cols ? _mm512_loadu_si512(x + (c + 1) * stride) : no_words();
      store_words(tiles, _mm512_permutex2var_epi16(a, low, b));
      store_words(tiles + tile_bytes, _mm512_permutex2var_epi16(a, high, b));
    }
    return;
  }
#endif
  for (int row = 0; row < rows; row += kTileRows)
    pack_columns<bf16>(reinterpret_cast<const Element*>(x) + row, stride / int64_t{sizeof(Element)}, static_cast<int>(least(kTileRows, rows - row)), cols,
                       tiles + row / kTileRows * tile_bytes);
}

template <bool bf16>
constexpr PackKernel kernel_of() {
  return {pack_rows<bf16, float>, pack_columns<bf16, float>, operand_rows<bf16>, operand_columns<bf16>, convert<bf16>, widen<bf16>};
}

}  // namespace

extern const PackKernels pack_kernels = {kernel_of<false>(), kernel_of<true>()};

}  // namespace CKDIST_ISA
}  // namespace ckdist
