// Expands grids with AVX-512 VBMI and BITALG: entries are looked up by permuting registers, 64 at a time, and a
// multishift moves a byte's field to its column. Chosen at run time, because not every CPU with AVX-512 has these.
// Private to isa/.
#pragma once
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 emits it for its own undefined vectors
#include <immintrin.h>

#include "kernels/interleaved.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

#define CKDIST_VBMI __attribute__((target("avx512vbmi,avx512bitalg")))
#define CKDIST_VBMI_INLINE [[gnu::always_inline]] CKDIST_VBMI inline

// The low and the high bytes of the entries. Entries of four values are spread: value i in bits 4 i of the entry.
template <Type type>
struct GridBytes {
  static constexpr Grid grid = grid_of(type);
  alignas(64) uint8_t plane[2][grid.count];

  constexpr GridBytes() : plane() {
    for (int i = 0; i < grid.count; ++i)
      for (int half = 0; half < 2; ++half) plane[half][i] = static_cast<uint8_t>(grid.entries[i] >> (8 * half));
  }
};
template <Type type>
inline constexpr GridBytes<type> kGridBytes = {};

// Looks up a byte for every byte of `index` in a table of `count`. The index bits above 7 are in `high`.
template <int count>
CKDIST_VBMI_INLINE __m512i look_up(const uint8_t* table, __m512i index, __m512i high) {
  if constexpr (count == 128) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  } else {
    const __m512i first = look_up<count / 2>(table, index, high),
                  second = look_up<count / 2>(table + count / 2, index, high);
    const __mmask64 upper =
        count == 256 ? _mm512_movepi8_mask(index) : _mm512_test_epi8_mask(high, _mm512_set1_epi8(count / 512));
    return _mm512_mask_blend_epi8(upper, first, second);
  }
}

// The high bytes of IQ1's grid, which is sorted: 16 consecutive entries have at most two different ones, the second
// from `bound` on.
struct SortedBytes {
  static constexpr int run = 16, runs = 2048 / run;
  alignas(64) uint8_t first[runs], last[runs], bound[runs];

  constexpr SortedBytes() : first(), last(), bound() {
    for (int i = 0; i < runs; ++i) {
      first[i] = static_cast<uint8_t>(kGridIq1[run * i] >> 8);
      last[i] = static_cast<uint8_t>(kGridIq1[run * i + run - 1] >> 8);
      while (bound[i] < run && kGridIq1[run * i + bound[i]] >> 8 == first[i]) ++bound[i];
    }
  }
  constexpr bool complete() const {
    for (int i = 0; i < runs * run; ++i)
      if ((i % run < bound[i / run] ? first : last)[i / run] != kGridIq1[i] >> 8) return false;
    return true;
  }
};
inline constexpr SortedBytes kIq1HighBytes = {};
static_assert(kIq1HighBytes.complete(), "16 entries in a row have two high bytes at most");

CKDIST_VBMI_INLINE __m512i look_up_sorted(__m512i index, __m512i high) {
  // Bits 4 to 10 of the index; higher bits are ignored.
  const __m512i run =
      _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), _mm512_srli_epi16(index, 4), _mm512_slli_epi16(high, 4), 0xca);
  const __m512i first = look_up<128>(kIq1HighBytes.first, run, high),
                last = look_up<128>(kIq1HighBytes.last, run, high);
  const __mmask64 after = _mm512_cmpge_epu8_mask(_mm512_and_si512(index, _mm512_set1_epi8(0x0f)),
                                                 look_up<128>(kIq1HighBytes.bound, run, high));
  return _mm512_mask_blend_epi8(after, first, last);
}

// Bit offsets in a pair of rows (64 bits): byte i of row r is at 32 r + i * step.
constexpr long long pair_offsets(int step) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes |= static_cast<uint64_t>(32 * (i / 4) + i % 4 * step) << (8 * i);
  return static_cast<long long>(bytes);
}

// The same for one row of 64 bits: byte i is at i * 4.
constexpr long long row_offsets() {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes |= static_cast<uint64_t>(4 * i) << (8 * i);
  return static_cast<long long>(bytes);
}

// Byte i of every row: the bits of its word from first + i * step on.
template <int step>
CKDIST_VBMI_INLINE __m512i fields(__m512i words, int first) {
  return _mm512_multishift_epi64_epi8(
      _mm512_add_epi8(_mm512_set1_epi64(pair_offsets(step)), _mm512_set1_epi8(static_cast<char>(first))), words);
}

// Column i of every row: bit first + i * step of its word.
template <int step>
CKDIST_VBMI_INLINE __mmask64 bits(__m512i words, int first) {
  return _mm512_bitshuffle_epi64_mask(
      words, _mm512_add_epi8(_mm512_set1_epi64(pair_offsets(step)), _mm512_set1_epi8(static_cast<char>(first))));
}

// Sign bits of 8 columns in a byte. The last one makes the number of ones even.
CKDIST_VBMI_INLINE __m512i even_signs(__m512i sevens) {
  const __m512i seven = _mm512_and_si512(sevens, _mm512_set1_epi8(0x7f));
  const __m512i parity = _mm512_slli_epi16(_mm512_popcnt_epi8(seven), 7);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0x80)), parity, seven, 0xea);  // (a & b) | c
}

// Every second byte of two words of a row, from `first` on.
template <int first>
CKDIST_VBMI_INLINE __m512i every_second(__m512i low, __m512i high) {
  alignas(64) static constexpr struct Places {
    uint8_t at[64];
    constexpr Places() : at() {
      for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(i / 4 * 4 + i % 2 * 2 + first + (i % 4 < 2 ? 0 : 64));
    }
  } places;
  return _mm512_permutex2var_epi8(low, _mm512_load_si512(places.at), high);
}

// Codes by level, repeated for every value of the other bits of a byte.
template <Type type, bool negative>
struct LevelTable {
  alignas(64) uint8_t codes[64];
  constexpr LevelTable() : codes() {
    constexpr Grid grid = grid_of(type);
    for (int i = 0; i < 64; ++i) codes[i] = (negative ? grid.negative : grid.positive)[i % (grid.values == 8 ? 4 : 8)];
  }
};
template <Type type, bool negative>
inline constexpr LevelTable<type, negative> kLevelTable = {};

// The stored fields of 32 columns: indices of their levels in the grid, and their signs.
struct GridCodes {
  __m512i index[2], high[2], signs;
};

template <Type type>
CKDIST_VBMI_INLINE GridCodes grid_codes(const uint8_t* packed, int g) {
  const auto word = [packed](int i) { return _mm512_loadu_si512(packed + 4 * kTileRows * i); };
  const int byte = 8 * (g % 4), pair = 16 * (g % 2);
  GridCodes codes{};
  if constexpr (type == Type::iq2_xxs) {
    codes.index[0] = word(2 * g);
    codes.signs = even_signs(fields<7>(word(2 * g + 1), 0));
  } else if constexpr (type == Type::iq2_xs) {
    const __m512i first = word(2 * g), second = word(2 * g + 1);
    codes.index[0] = every_second<0>(first, second);
    codes.high[0] = every_second<1>(first, second);
    codes.signs = even_signs(_mm512_srli_epi16(codes.high[0], 1));
  } else if constexpr (type == Type::iq2_s) {
    codes.index[0] = word(g);
    codes.high[0] = fields<2>(word(16 + g / 4), byte);
    codes.signs = word(8 + g);
  } else if constexpr (type == Type::iq1_s || type == Type::iq1_m) {
    codes.index[0] = word(g);
    codes.signs = word(8 + g / 2);
    codes.high[0] = fields<type == Type::iq1_s ? 3 : 4>(codes.signs, pair);
  } else {
    codes.index[0] = word(2 * g);
    codes.index[1] = word(2 * g + 1);
    if constexpr (type == Type::iq3_s) {
      codes.high[0] = fields<1>(word(16 + g / 4), byte);
      codes.high[1] = fields<1>(word(16 + g / 4), byte + 4);
      codes.signs = word(18 + g);
    } else {
      codes.signs = even_signs(fields<7>(word(16 + g), 0));
    }
  }
  return codes;
}

// The levels of 32 columns, four of each row in a vector.
template <Type type>
CKDIST_VBMI_INLINE void grid_levels(const GridCodes& codes, __m512i (&levels)[kGroupColumns / 4]) {
  constexpr Type grid = type == Type::iq1_m ? Type::iq1_s : type;
  constexpr int count = grid_of(grid).count;
  const uint8_t *const low_bytes = kGridBytes<grid>.plane[0], *const high_bytes = kGridBytes<grid>.plane[1];
  if constexpr (grid_of(grid).values == 8) {
    const __m512i low_halves = look_up<count>(low_bytes, codes.index[0], codes.high[0]);
    const __m512i high_halves = grid == Type::iq1_s ? look_up_sorted(codes.index[0], codes.high[0])
                                                    : look_up<count>(high_bytes, codes.index[0], codes.high[0]);
#pragma GCC unroll 8
    for (int step = 0; step < kGroupColumns / 4; ++step)
      levels[step] = fields<2>(step % 2 ? high_halves : low_halves, step / 2 * 8);
  } else {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i a = look_up<count>(low_bytes, codes.index[half], codes.high[half]),
                    b = look_up<count>(high_bytes, codes.index[half], codes.high[half]);
      const __m512i rows[2] = {_mm512_unpacklo_epi8(a, b),
                               _mm512_unpackhi_epi8(a, b)};  // rows 0 and 1, 2 and 3 of every four
#pragma GCC unroll 2
      for (int two = 0; two < 2; ++two) {
        const __m512i at =
            _mm512_add_epi8(_mm512_set1_epi64(row_offsets()), _mm512_set1_epi8(static_cast<char>(32 * two)));
        const __m512 first = _mm512_castsi512_ps(_mm512_multishift_epi64_epi8(at, rows[0]));
        const __m512 second = _mm512_castsi512_ps(_mm512_multishift_epi64_epi8(at, rows[1]));
        levels[4 * half + 2 * two] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88));
        levels[4 * half + 2 * two + 1] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd));
      }
    }
  }
}

template <Type type>
CKDIST_VBMI void expand_grid_vbmi(const uint8_t* packed, uint8_t* block) {
  typedef uint32_t Lanes __attribute__((vector_size(64)));
  constexpr BlockLayout layout = layout_of(type);
  constexpr Type grid = type == Type::iq1_m ? Type::iq1_s : type;
  constexpr int parts = kGroupColumns / layout.group, line = 4 * kTileRows;
  const __m512i positive = _mm512_load_si512(kLevelTable<grid, false>.codes),
                negative = _mm512_load_si512(kLevelTable<grid, true>.codes);
  for (int g = 0; g < layout.columns / kGroupColumns; ++g) {
    const int pair = 16 * (g % 2);
    uint8_t* const plane = block + layout.planes() + g * layout.plane_bytes();
    const GridCodes stored = grid_codes<type>(packed, g);
    __m512i levels[kGroupColumns / 4];
    grid_levels<type>(stored, levels);
#pragma GCC unroll 8
    for (int step = 0; step < kGroupColumns / 4; ++step) {
      __mmask64 set;
      if constexpr (type == Type::iq1_s) set = bits<0>(stored.signs, pair + 15);
      else if constexpr (type == Type::iq1_m) set = bits<0>(stored.signs, pair + step / 2 * 4 + 3);
      else set = bits<1>(stored.signs, 4 * step);
      const __m512i codes = _mm512_permutexvar_epi8(levels[step], positive);
      _mm512_storeu_si512(plane + line * step, _mm512_mask_permutexvar_epi8(codes, set, levels[step], negative));
    }
    const auto group =
        GroupBits<type, Lanes>::of(g, [packed](int i) { return (Lanes)_mm512_loadu_si512(packed + line * i); });
#pragma GCC unroll 2
    for (int p = 0; p < parts; ++p)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(block + (g * parts + p) * kTileRows),
                       _mm512_cvtepi32_epi8((__m512i)group.scale[p]));
  }
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
