// Grid entries of four rows, with their signs. Private to expand.h.
#pragma once
#include "kernels/isa/words.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kGridRows = 4;
typedef uint32_t GridLanes __attribute__((vector_size(4 * kGridRows)));

// Loads entries of two words: the first words of all rows, then the second words.
CKDIST_INLINE void load_entries(const uint32_t* table, GridLanes index, GridLanes* out) {
  const auto two = [&](int row) {
    const auto entry = [&](int i) { return vld1_u32(table + 2 * uint64_t{index[row + i]}); };
    return vcombine_u32(entry(0), entry(1));
  };
  const uint32x4_t low = two(0), high = two(2);
  out[0] = (GridLanes)vuzp1q_u32(low, high);
  out[1] = (GridLanes)vuzp2q_u32(low, high);
}

CKDIST_INLINE GridLanes load_entries(const uint32_t* table, GridLanes i) {
  return GridLanes{table[i[0]], table[i[1]], table[i[2]], table[i[3]]};
}

// Codes of 4 columns. If the column's bit of `signs` is set, a code is replaced by 256 - code (code - 2 if `leaning`:
// IQ1).
template <bool leaning>
CKDIST_INLINE uint8x16_t with_signs(GridLanes codes, GridLanes signs, int step) {
  const uint8x16_t lanes = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const uint8x16_t byte = vaddq_u8(lanes, vdupq_n_u8(static_cast<uint8_t>(step / 2)));
  const uint8x16_t bits = vreinterpretq_u8_u32(vdupq_n_u32(step % 2 ? 0x80402010u : 0x08040201u));
  const uint8x16_t set = vtstq_u8(vqtbl1q_u8((uint8x16_t)signs, byte), bits), c = (uint8x16_t)codes;
  if constexpr (leaning) return vsubq_u8(c, vandq_u8(set, vdupq_n_u8(2)));
  return vbslq_u8(set, vsubq_u8(vdupq_n_u8(0), c), c);
}

CKDIST_INLINE void store_codes(uint8_t* p, uint8x16_t codes) { vst1q_u8(p, codes); }

CKDIST_INLINE void store_low_bytes(uint8_t* p, GridLanes a) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)a);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
  std::memcpy(p, &four, sizeof four);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
