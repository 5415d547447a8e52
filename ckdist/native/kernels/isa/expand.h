// Expands blocks that are packed as they are stored (kernels/interleaved.h) to blocks of layout_of their type. Private
// to isa/.
#pragma once
#include <cstring>

#include "kernels/half.h"
#include "kernels/interleaved.h"
#include "kernels/isa/float8.h"
#include "kernels/layout_blocks.h"
#if defined(__AVX2__) || defined(CKDIST_NEON)
#include "kernels/isa/words.h"
#endif
#if defined(__AVX512F__)
#include "kernels/isa/expand_vbmi.h"
#elif defined(CKDIST_NEON)
#include "kernels/isa/expand_neon.h"
#endif

namespace ckdist {
namespace CKDIST_ISA {
namespace {

using ExpandBlock = void (*)(const uint8_t* packed, uint8_t* block);

// Types with the same expanded layout are multiplied by the code of the type returned here.
constexpr Type form_of(Type type) {
  return !is_interleaved(type) ? type : layout_of(type).group == kGroupColumns ? Type::iq2_xxs : Type::iq2_xs;
}

#if defined(__AVX2__) || defined(CKDIST_NEON)

typedef uint8_t WordBytes __attribute__((vector_size(sizeof(Words))));

CKDIST_INLINE Words load_words(const uint8_t* p) { return read_as<Words>(p); }

#if defined(__AVX512F__)
CKDIST_INLINE void store_halves_as_floats(uint8_t* p, Words halves, float unit) {
  const __m512 floats = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
  _mm512_storeu_ps(reinterpret_cast<float*>(p), _mm512_mul_ps(floats, _mm512_set1_ps(unit)));
}
#elif defined(CKDIST_NEON)
CKDIST_INLINE void store_halves_as_floats(uint8_t* p, Words halves, float unit) {
  const float32x4_t floats = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)halves)));
  vst1q_f32(reinterpret_cast<float*>(p), vmulq_n_f32(floats, unit));
}
#else
CKDIST_INLINE void store_halves_as_floats(uint8_t* p, Words halves, float unit) {
  const __m128i narrow =
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)halves), _mm256_extracti128_si256((__m256i)halves, 1));
  _mm256_storeu_ps(reinterpret_cast<float*>(p), _mm256_mul_ps(_mm256_cvtph_ps(narrow), _mm256_set1_ps(unit)));
}
#endif

#if !defined(CKDIST_NEON)  // expand_neon.h has its own

// Grid entries are loaded one by one, which is faster than a gather: for eight rows at a time, with any register size.
constexpr int kGridRows = 8;
typedef uint32_t GridLanes __attribute__((vector_size(4 * kGridRows)));

// Loads entries of two words: the first words of all rows, then the second words.
CKDIST_INLINE void load_entries(const uint32_t* table, GridLanes index, GridLanes* out) {
  const auto two = [&](int row) {
    const auto entry = [&](int i) { return reinterpret_cast<const __m64*>(table + 2 * uint64_t{index[row + i]}); };
    return _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(entry(0)))), entry(1));
  };
  const __m256 even = _mm256_insertf128_ps(_mm256_castps128_ps256(two(0)), two(4), 1);
  const __m256 odd = _mm256_insertf128_ps(_mm256_castps128_ps256(two(2)), two(6), 1);
  out[0] = (GridLanes)_mm256_shuffle_ps(even, odd, 0x88);
  out[1] = (GridLanes)_mm256_shuffle_ps(even, odd, 0xdd);
}

CKDIST_INLINE GridLanes load_entries(const uint32_t* table, GridLanes i) {
  return GridLanes{table[i[0]], table[i[1]], table[i[2]], table[i[3]],
                   table[i[4]], table[i[5]], table[i[6]], table[i[7]]};
}

// Codes of 4 columns. If the column's bit of `signs` is set, a code is replaced by 256 - code (code - 2 if `leaning`:
// IQ1).
template <bool leaning>
CKDIST_INLINE __m256i with_signs(GridLanes codes, GridLanes signs, int step) {
  const __m256i lanes = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i byte = _mm256_add_epi8(lanes, _mm256_set1_epi8(static_cast<char>(step / 2)));
  const __m256i bits = _mm256_set1_epi32(step % 2 ? static_cast<int>(0x80402010u) : 0x08040201);
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8((__m256i)signs, byte), bits), bits);
  const __m256i c = (__m256i)codes;
  if constexpr (leaning) return _mm256_sub_epi8(c, _mm256_and_si256(set, _mm256_set1_epi8(2)));
  return _mm256_blendv_epi8(c, _mm256_sub_epi8(_mm256_setzero_si256(), c), set);
}

CKDIST_INLINE void store_low_bytes(uint8_t* p, GridLanes a) {
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}

CKDIST_INLINE void store_codes(uint8_t* p, __m256i codes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes); }

#endif

template <Type type>
void expand_grid(const uint8_t* packed, uint8_t* block, int row) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr Type grid = type == Type::iq1_m ? Type::iq1_s : type;
  constexpr int parts = kGroupColumns / layout.group, words = GridWords<grid>::words, line = 4 * kTileRows;
  const uint32_t* const table = kGridWords<grid>.codes;
  for (int g = 0; g < layout.columns / kGroupColumns; ++g) {
    const auto bits =
        GroupBits<type, GridLanes>::of(g, [&](int i) { return read_as<GridLanes>(packed + line * i + 4 * row); });
    uint8_t* const plane = block + layout.planes() + g * layout.plane_bytes() + 4 * row;
#pragma GCC unroll 8
    for (int step = 0; step < kGroupColumns / 4; step += words) {
      GridLanes codes[words];
      if constexpr (words == 2) load_entries(table, bits.index[step / 2], codes);
      else codes[0] = load_entries(table, bits.index[step]);
      for (int w = 0; w < words; ++w)
        store_codes(plane + line * (step + w), with_signs<grid == Type::iq1_s>(codes[w], bits.signs, step + w));
    }
    for (int p = 0; p < parts; ++p) store_low_bytes(block + (g * parts + p) * kTileRows + row, bits.scale[p]);
  }
}

// A word of TQ1_0: `count` base-3 digits of each byte, the most significant first. A digit is (byte * 3) / 256.
template <int count, int stride>
CKDIST_INLINE void expand_digits(WordBytes bytes, uint8_t* to) {
#pragma GCC unroll 5
  for (int part = 0; part < count; ++part) {
    WordBytes codes = bytes - bytes + static_cast<uint8_t>(127);
#if defined(__AVX512F__)
    const __m512i one = _mm512_set1_epi8(1);
    const __mmask64 some = _mm512_cmpgt_epu8_mask((__m512i)bytes, _mm512_set1_epi8(85));
    const __mmask64 two = _mm512_cmpgt_epu8_mask((__m512i)bytes, _mm512_set1_epi8(static_cast<char>(170)));
    const __m512i first = _mm512_mask_blend_epi8(some, (__m512i)codes, _mm512_set1_epi8(static_cast<char>(128)));
    codes = (WordBytes)_mm512_mask_add_epi8(first, two, first, one);
#else
    codes = codes - (WordBytes)(bytes > 85) - (WordBytes)(bytes > 170);
#endif
    store(to + 4 * kTileRows * stride * part, (Words)codes);
    bytes = bytes + bytes + bytes;
  }
}

template <Type type>
void expand_ternary(const uint8_t* packed, uint8_t* block, int row) {
  constexpr BlockLayout layout = layout_of(type);
  constexpr int line = 4 * kTileRows;
  uint8_t* const plane = block + layout.planes() + 4 * row;
  const auto word = [&](int i) { return load_words(packed + line * i + 4 * row); };
  if constexpr (type == Type::tq2_0) {
    for (int at = 0; at < 16; ++at) {
      const Words codes = word(at);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part)
        store(plane + line * (at / 8 * 32 + at % 8 + 8 * part), (codes >> (2 * part) & 0x03030303u) + 0x7f7f7f7fu);
    }
  } else {
    for (int at = 0; at < 8; ++at) expand_digits<5, 8>((WordBytes)word(at), plane + line * at);
    for (int at = 0; at < 4; ++at) expand_digits<5, 4>((WordBytes)word(8 + at), plane + line * (40 + at));
    expand_digits<4, 1>((WordBytes)word(12), plane + line * 60);
  }
  for (int g = 0; g < layout.groups(); ++g) std::memset(block + g * kTileRows + row, 1, kWordRows);
}

template <Type type>
CKDIST_INLINE Words stored_scales(const uint8_t* packed, int row) {
  constexpr InterleavedLayout layout = interleaved_of(type);
  if constexpr (layout.scale_at < 0)
    return iq1_m_scale(load_words(packed + 4 * kTileRows * 12 + 4 * row),
                       load_words(packed + 4 * kTileRows * 13 + 4 * row));
  Words halves;
  for (int i = 0; i < kWordRows; ++i) {
    uint16_t half = read_as<uint16_t>(packed + layout.scales() + 2 * (row + i));
    halves[i] = half;
  }
  return halves;
}

// True if the CPU can look up entries in registers.
#if defined(__AVX512F__)
inline bool has_vbmi() {
  static const bool has = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg");
  return has;
}
#endif

template <Type type, bool vbmi>
void expand_block(const uint8_t* packed, uint8_t* block) {
  if constexpr (grid_of(type).count == 0) {
    for (int row = 0; row < kTileRows; row += kWordRows) expand_ternary<type>(packed, block, row);
#if defined(__AVX512F__)
  } else if constexpr (vbmi) {
    expand_grid_vbmi<type>(packed, block);
#endif
  } else {
    for (int row = 0; row < kTileRows; row += kGridRows) expand_grid<type>(packed, block, row);
  }
  for (int row = 0; row < kTileRows; row += kWordRows)
    store_halves_as_floats(block + layout_of(type).block_scale() + 4 * row, stored_scales<type>(packed, row),
                           interleaved_of(type).unit);
}

#else

template <Type type, bool>
void expand_block(const uint8_t* packed, uint8_t* block) {
  constexpr InterleavedLayout layout = interleaved_of(type);
  constexpr BlockLayout to = layout_of(type);
  for (int row = 0; row < kTileRows; ++row) {
    uint8_t stored[type_traits(type).block_bytes];
    for (int i = 0; i < layout.words; ++i)
      std::memcpy(stored + layout.words_at + 4 * i, packed + 4 * (kTileRows * i + row), 4);
    if (layout.scale_at >= 0) std::memcpy(stored + layout.scale_at, packed + layout.scales() + 2 * row, 2);
    ckdist::Block source;
    read_block<type>(stored, source);
    for (int step = 0; step < to.columns / 4; ++step)
      std::memcpy(block + to.planes() + 4 * (kTileRows * step + row), source.codes + 4 * step, 4);
    for (int g = 0; g < to.groups(); ++g) block[g * kTileRows + row] = source.scales[g];
    const float scale = float_of_half(source.scale) * layout.unit;
    std::memcpy(block + to.block_scale() + 4 * row, &scale, sizeof scale);
  }
}

#endif

template <Type type>
ExpandBlock expand_of() {
  if constexpr (is_float8(type)) return expand_float8<type>;
  else if constexpr (!is_interleaved(type)) return nullptr;
  else {
#if defined(__AVX512F__)
    if constexpr (grid_of(type).count > 0)
      if (has_vbmi()) return expand_block<type, true>;
#endif
    return expand_block<type, false>;
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
