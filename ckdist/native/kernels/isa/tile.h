// The tile registers of Intel AMX: eight tiles of up to 16 rows of 64 bytes (palette 1; Intel's Software Developer's
// Manual, volume 1, chapter 18, "Programming with Intel AMX"; instructions in volume 2). A thread configures the tiles,
// uses them and releases them. A released state costs nothing in a thread switch; a live one costs 8 KB. The kernel
// must have permitted tiles for the process (request_amx). At a thread's first use it reserves memory.
//
// Written in assembly: GCC's intrinsics (before version 15) do not declare their memory accesses, and they accept no
// template arguments. Tests compile the same kernels with a model of these operations: CKDIST_TILES names its header.
#pragma once
#include <cstdint>

namespace ckdist {

constexpr int kTiles = 8, kTileMostRows = 16, kTileRowBytes = 64;

// The operand of LDTILECFG. A tile without rows must have no columns either, and raises a fault when used.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;  // row at which an interrupted load or store continues
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // for tiles 0 to 7; the others are reserved
  uint8_t rows[16] = {};        // for tiles 0 to 7; the others are reserved

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

// Configures all tiles, and sets them to zero.
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

// The same, with a hint that the rows need not stay in the L1 cache.
template <int tile>
inline void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "n"(tile) : "memory");
}

template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "n"(tile) : "memory");
}

// sum[m][n] += dot of four bytes a[m][k] and four bytes b[k][n], over all k; int32. Template arguments set the
// signedness of a and b.
template <int sum, int a, int b, bool a_signed = true, bool b_signed = true>
inline void tile_dot_bytes() {
  if constexpr (a_signed && b_signed) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else if constexpr (a_signed) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else if constexpr (b_signed) asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
  else asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
}

// The same for pairs of bfloat16 in float32. The first elements of all pairs, and the second ones, are each a chain of
// fused operations; both results are added to sum. Denormal inputs and results count as zero; rounding is to nearest
// even.
template <int sum, int a, int b>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(sum), "n"(a), "n"(b));
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist

#endif
