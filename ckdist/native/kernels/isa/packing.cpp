// Packs and transposes floats in blocks of 16 x 16 words. A word is one float, or a pair of bfloat16.
#include "kernels/packing.h"

#include "kernels/isa/simd.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Type of a tile's elements, and of their sources.
enum class Form {
  f32,      // floats from floats
  widened,  // floats from bfloat16, or from floats rounded to bfloat16
  bf16,     // pairs of bfloat16: neighbours in a row, or from neighbouring rows
};
template <Form form>
constexpr int kUnit = form == Form::bf16 ? 2 : 1;  // elements of a word

CKDIST_INLINE Vec load_some(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : n > 0 ? load_n(p, static_cast<int>(n)) : set(0.0f);
}
CKDIST_INLINE Vec load_some(const uint16_t* p, int64_t n) {
  if (n >= kLanes) return load_bf16(p);
  uint16_t some[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) some[i] = p[i];
  return load_bf16(some);
}

#if defined(__AVX512BF16__)

CKDIST_INLINE Vec words(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }
CKDIST_INLINE Vec pairs_along(const float* p, int64_t n) {
  return words(to_bf16(load_some(p, n), load_some(p + kLanes, n - kLanes)));
}
CKDIST_INLINE Vec pairs_along(const uint16_t* p, int64_t n) {
  return words(n >= 32 ? _mm512_loadu_si512(p)
               : n > 0 ? _mm512_maskz_loadu_epi16((1u << n) - 1, p)
                       : _mm512_setzero_si512());
}
CKDIST_INLINE __m512i halves(const float* p, int64_t n) { return _mm512_cvtepu16_epi32(to_bf16(load_some(p, n))); }
CKDIST_INLINE __m512i halves(const uint16_t* p, int64_t n) {
  const __mmask16 some = static_cast<__mmask16>((1u << (n < kLanes ? n : kLanes)) - 1);
  return _mm512_cvtepu16_epi32(n >= kLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                           : _mm256_maskz_loadu_epi16(some, p));
}
// Pairs of two rows, element by element.
template <class Element>
CKDIST_INLINE Vec pairs_across(const Element* p, const Element* q, int64_t n) {
  const __m512i low = halves(p, n);
  return words(q ? _mm512_or_si512(low, _mm512_slli_epi32(halves(q, n), 16)) : low);
}

#endif

// The words that begin at p, of n existing elements.
template <Form form, class Element>
CKDIST_INLINE Vec along(const Element* p, int64_t n) {
#if defined(__AVX512BF16__)
  if constexpr (form == Form::bf16) return pairs_along(p, n);
#endif
  if constexpr (form == Form::widened && sizeof(Element) == 4) return rounded_to_bf16(load_some(p, n));
  else return load_some(p, n);
}

// Word i of the rows of a word from x on, with n columns. Rows from `left` on are zeros.
template <Form form, class Element>
CKDIST_INLINE Vec row_words(const Element* x, int64_t stride, int64_t left, int64_t n) {
  (void)stride;
  if (left <= 0) return set(0.0f);
#if defined(__AVX512BF16__)
  if constexpr (form == Form::bf16) return pairs_across(x, left > 1 ? x + stride : nullptr, n);
#endif
  return along<form>(x, n);
}

CKDIST_INLINE void store_words(uint8_t* p, Vec a) { store(reinterpret_cast<float*>(p), a); }

// Floats are weights, which come from memory. The next tile's, and those a few rows ahead, are prefetched to the L2
// cache.
constexpr int64_t kFetchRows = 32;
CKDIST_INLINE void fetch(const float* p, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * kLanes, 0, 2);
}
CKDIST_INLINE void fetch(const uint16_t*, int) {}

template <Form form, class Element>
void pack_rows(const Element* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  constexpr int unit = kUnit<form>;
  const int64_t words = (cols + 15) / 16 * 16 / unit;
  for (int64_t w = 0; w < words; w += 16) {
    Vec block[16];
    for (int r = 0; r < 16; ++r) {
      block[r] = r < rows ? along<form>(x + r * stride + w * unit, cols - w * unit) : set(0.0f);
      fetch(x + (r + 16) * stride + w * unit, unit);
    }
    transpose(block);
    for (int j = 0; j < least(16, words - w); ++j) store_words(tile + (w + j) * 64, block[j]);
  }
}

template <Form form, class Element>
void pack_columns(const Element* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  constexpr int unit = kUnit<form>;
  const int64_t padded = (cols + 15) / 16 * 16;
  for (int64_t c = 0; c < padded; c += unit, tile += 64) {
    for (int i = 0; i < unit; ++i) fetch(x + (c + kFetchRows + i) * stride, 1);
    store_words(tile, row_words<form>(x + c * stride, stride, cols - c, rows));
  }
}

template <bool narrow>
void convert(const float* x, int64_t n, int64_t padded, uint8_t* out) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec value = load_some(x + i, n - i);
    if constexpr (narrow) {
      uint16_t some[kLanes], *const to = reinterpret_cast<uint16_t*>(out) + i;
      if (padded - i >= kLanes) {
        store_bf16(to, value);
      } else {
        store_bf16(some, value);
        std::memcpy(to, some, 2 * static_cast<size_t>(padded - i));
      }
    } else {
      store_n(reinterpret_cast<float*>(out) + i, value, static_cast<int>(least(kLanes, padded - i)));
    }
  }
}

template <bool narrow>
void widen(const uint8_t* x, int64_t n, float* out) {
  if constexpr (!narrow) {
    std::memcpy(out, x, 4 * static_cast<size_t>(n));
  } else {
    const uint16_t* const p = reinterpret_cast<const uint16_t*>(x);
    int64_t i = 0;
    for (; n - i >= kLanes; i += kLanes) store(out + i, load_bf16(p + i));
    for (; i < n; ++i) out[i] = float_of_bf16(p[i]);
  }
}

template <Form form>
struct Operand {
  using Element = uint16_t;
};
template <>
struct Operand<Form::f32> {
  using Element = float;
};

template <Form form>
void operand_rows(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tile) {
  using Element = typename Operand<form>::Element;
  pack_rows<form>(reinterpret_cast<const Element*>(x), stride / int64_t{sizeof(Element)}, rows, cols, tile);
}

#if defined(__AVX512BF16__)
// Two tiles: whole cache lines, two of them interleaved.
void pairs_of_columns(const uint8_t* x, int64_t stride, int64_t cols, uint8_t* tiles, int64_t tile_bytes) {
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(32)), 16));
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16)), none = _mm512_setzero_si512();
  for (int64_t c = 0; c < (cols + 15) / 16 * 16; c += 2, tiles += 64) {
    const __m512i a = c < cols ? _mm512_loadu_si512(x + c * stride) : none,
                  b = c + 1 < cols ? _mm512_loadu_si512(x + (c + 1) * stride) : none;
    store_words(tiles, words(_mm512_permutex2var_epi16(a, low, b)));
    store_words(tiles + tile_bytes, words(_mm512_permutex2var_epi16(a, high, b)));
  }
}
#endif

template <Form form>
void operand_columns(const uint8_t* x, int64_t stride, int rows, int64_t cols, uint8_t* tiles, int64_t tile_bytes) {
  using Element = typename Operand<form>::Element;
#if defined(__AVX512BF16__)
  if (form == Form::bf16 && rows == 2 * kTileRows) return pairs_of_columns(x, stride, cols, tiles, tile_bytes);
#endif
  for (int row = 0; row < rows; row += kTileRows)
    pack_columns<form>(reinterpret_cast<const Element*>(x) + row, stride / int64_t{sizeof(Element)},
                       static_cast<int>(least(kTileRows, rows - row)), cols, tiles + row / kTileRows * tile_bytes);
}

template <Form form>
constexpr PackKernel kernel_of() {
  constexpr bool narrow = form != Form::f32;
  return {pack_rows<form, float>, pack_columns<form, float>, operand_rows<form>,
          operand_columns<form>,  convert<narrow>,           widen<narrow>};
}

#if defined(__AVX512BF16__)
constexpr Form kOfBf16 = Form::bf16;
#else
constexpr Form kOfBf16 = Form::widened;
#endif

}  // namespace

extern const PackKernels pack_kernels = {kernel_of<Form::f32>(), kernel_of<kOfBf16>()};

}  // namespace CKDIST_ISA
}  // namespace ckdist
