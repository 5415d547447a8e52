// The tile registers of Intel AMX as this code uses them: eight tiles of up to 16 rows of 64 bytes (palette 1; Intel's
// Software Developer's Manual, volume 1, chapter 18, "Programming with Intel AMX"; instructions in volume 2). A thread
// gives tiles their shapes, uses them and releases them: a released state costs nothing when threads are switched, a
// live one 8 KB. The kernel must have permitted tiles to the process before (request_amx); a thread's first use then
// has it set memory aside, once.
//
// Written as assembly, since GCC's own intrinsics (before 15) do not say that they read and write memory, and take no
// template arguments. Tests compile the same kernels against a model of these operations: CKDIST_TILES names its
// header.
#pragma once
#include <cstdint>

namespace ckdist {

constexpr int kTiles = 8, kTileMostRows = 16, kTileRowBytes = 64;

// The operand of LDTILECFG. A tile with no rows must have no columns either, and faults when used.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;  // where an interrupted load or store goes on
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of tiles 0 to 7; the others are reserved
  uint8_t rows[16] = {};        // likewise

  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_rows ? bytes : 0);
  }
};
static_assert(sizeof(TileShapes) == 64, "the operand of LDTILECFG");

}  // namespace ckdist

#ifdef CKDIST_TILES
#include CKDIST_TILES
#else

namespace ckdist {
namespace CKDIST_ISA {
namespace {

// Shapes all tiles, and zeroes them.
inline void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void tile_release() { asm volatile("tilerelease"); }

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"n"(tile));
}

// Rows `stride` bytes apart.
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "n"(tile) : "memory");
}

template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "n"(tile) : "memory");
}

// sum[m][n] += dot of four bytes a[m][k] and four bytes b[k][n], over all k; int32. Whether a's and b's are signed.
template <int sum, int a, int b, bool a_signed = true, bool b_signed = true>
inline void tile_dot_bytes() {
  if constexpr (a_signed && b_signed) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else if constexpr (a_signed) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else if constexpr (b_signed) asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
}

// The same of pairs of bfloat16 in float32: the first of all pairs and the second of all pairs make a chain of fused
// operations each, and sum grows by the sum of both. Denormals count and leave as zero, rounding is to nearest even.
template <int sum, int a, int b>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist

#endif
