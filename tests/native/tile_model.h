// The tile operations of kernels/isa/tile.h in plain C++, from the pseudo-code of Intel's Software Developer's Manual
// (volume 2: LDTILECFG, TILEZERO, TILELOADD, TILESTORED, TDPBSSD and its variants, TDPBF16PS, TILERELEASE), for
// machines without AMX. Operations that would raise a fault in hardware end the process with that signal and a line.
#pragma once
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace ckdist {

// Counts of all threads since the start. `rows` counts rows of sums in products.
struct TileCounts {
  std::atomic<int64_t> configured, loads, stores, products, rows;
};
extern TileCounts tile_counts;

struct TileModel {
  TileShapes shapes;
  bool configured;
  uint8_t data[kTiles][kTileMostRows][kTileRowBytes];
};
extern thread_local TileModel tile_model;

namespace CKDIST_ISA {
namespace {

inline void check(bool good, const char* fault, int signal = SIGILL) {
  if (good) return;
  std::fprintf(stderr, "tiles: %s\n", fault);
  std::raise(signal);
  std::abort();
}

inline void count(std::atomic<int64_t>& counter, int64_t more = 1) {
  counter.fetch_add(more, std::memory_order_relaxed);
}

inline void check_usable(int tile) {
  check(tile_model.configured && tile_model.shapes.rows[tile] > 0, "#UD: a tile without a shape");
}

inline void tile_configure(const TileShapes& shapes) {
  tile_model = {};
  bool good = shapes.palette == 1 && shapes.start_row == 0;
  for (uint8_t byte : shapes.reserved) good = good && byte == 0;
  for (int i = 0; i < 16; ++i) {
    good = good && (i < ckdist::kTiles || (shapes.rows[i] == 0 && shapes.row_bytes[i] == 0));
    good = good && shapes.rows[i] <= kTileMostRows && shapes.row_bytes[i] <= kTileRowBytes &&
           !shapes.rows[i] == !shapes.row_bytes[i];
  }
  check(good, "#GP: shapes that LDTILECFG refuses", SIGSEGV);
  tile_model.shapes = shapes;
  tile_model.configured = true;
  count(tile_counts.configured);
}

inline void tile_release() { tile_model = {}; }

template <int tile>
inline void tile_zero() {
  check_usable(tile);
  std::memset(tile_model.data[tile], 0, sizeof tile_model.data[tile]);
}

template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  check_usable(tile);
  count(tile_counts.loads);
  TileModel& model = tile_model;                              // one look-up of the thread's
  std::memset(model.data[tile], 0, sizeof model.data[tile]);  // beyond the shape
  for (int row = 0; row < model.shapes.rows[tile]; ++row)
    std::memcpy(model.data[tile][row], static_cast<const uint8_t*>(from) + row * stride, model.shapes.row_bytes[tile]);
}

template <int tile>
inline void tile_stream(const void* from, int64_t stride) {
  tile_load<tile>(from, stride);
}

template <int tile>
inline void tile_store(void* to, int64_t stride) {
  check_usable(tile);
  count(tile_counts.stores);
  const TileModel& model = tile_model;
  for (int row = 0; row < model.shapes.rows[tile]; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, model.data[tile][row], model.shapes.row_bytes[tile]);
}

template <int sum, int a, int b>
inline void check_shapes() {
  static_assert(sum != a && sum != b && a != b, "#UD: a tile named twice");
  check_usable(sum), check_usable(a), check_usable(b);
  const TileShapes& s = tile_model.shapes;
  count(tile_counts.products), count(tile_counts.rows, s.rows[sum]);
  check(s.rows[sum] == s.rows[a] && s.row_bytes[sum] == s.row_bytes[b] && s.row_bytes[a] / 4 == s.rows[b] &&
            s.row_bytes[sum] % 4 == 0 && s.row_bytes[a] % 4 == 0,
        "#UD: shapes that do not fit each other");
}

// Beyond the shape of the sums, rows and columns become zero.
inline void write_row_and_zero(TileModel& tiles, int sum, int row, const void* values) {
  std::memset(tiles.data[sum][row], 0, kTileRowBytes);
  std::memcpy(tiles.data[sum][row], values, tiles.shapes.row_bytes[sum]);
}

inline void zero_upper_rows(TileModel& tiles, int sum) {
  for (int row = tiles.shapes.rows[sum]; row < kTileMostRows; ++row)
    std::memset(tiles.data[sum][row], 0, kTileRowBytes);
}

inline int byte_of(uint8_t byte, bool is_signed) { return is_signed ? static_cast<int8_t>(byte) : byte; }

// The kernels around the model are compiled quickly; these loops run longest.
#if defined(__GNUC__) && !defined(__clang__)
#define CKDIST_VECTORIZED __attribute__((optimize("O3")))
#else
#define CKDIST_VECTORIZED
#endif

template <int sum, int a, int b, bool a_signed = true, bool b_signed = true>
CKDIST_VECTORIZED inline void tile_dot_bytes() {
  check_shapes<sum, a, b>();
  TileModel& tiles = tile_model;
  const int columns = tiles.shapes.row_bytes[sum] / 4, depth = tiles.shapes.row_bytes[a] / 4;
  for (int m = 0; m < tiles.shapes.rows[sum]; ++m) {
    int32_t row[kTileRowBytes / 4];
    std::memcpy(row, tiles.data[sum][m], sizeof row);
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n)
        for (int i = 0; i < 4; ++i)
          row[n] = static_cast<int32_t>(static_cast<uint32_t>(row[n]) +
                                        static_cast<uint32_t>(byte_of(tiles.data[a][m][4 * k + i], a_signed) *
                                                              byte_of(tiles.data[b][k][4 * n + i], b_signed)));
    write_row_and_zero(tiles, sum, m, row);
  }
  zero_upper_rows(tiles, sum);
}

inline float without_denormal(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

inline float bf16_at(const uint8_t* row, int index) {
  uint16_t half;
  std::memcpy(&half, row + 2 * index, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return without_denormal(value);
}

template <int sum, int a, int b>
CKDIST_VECTORIZED inline void tile_dot_bf16() {
  check_shapes<sum, a, b>();
  constexpr int kColumns = kTileRowBytes / 4;
  TileModel& tiles = tile_model;
  const int columns = tiles.shapes.row_bytes[sum] / 4, depth = tiles.shapes.row_bytes[a] / 4;
  float even[kTileMostRows][kColumns] = {}, odd[kTileMostRows][kColumns] = {};
  for (int k = 0; k < depth; ++k)
    for (int n = 0; n < columns; ++n) {
      even[k][n] = bf16_at(tiles.data[b][k], 2 * n);
      odd[k][n] = bf16_at(tiles.data[b][k], 2 * n + 1);
    }
  for (int m = 0; m < tiles.shapes.rows[sum]; ++m) {
    float first[kColumns] = {}, second[kColumns] = {}, row[kColumns];
    std::memcpy(row, tiles.data[sum][m], sizeof row);
    for (int k = 0; k < depth; ++k) {
      const float left = bf16_at(tiles.data[a][m], 2 * k), right = bf16_at(tiles.data[a][m], 2 * k + 1);
      for (int n = 0; n < kColumns; ++n) {
        first[n] = without_denormal(std::fma(left, even[k][n], first[n]));
        second[n] = without_denormal(std::fma(right, odd[k][n], second[n]));
      }
    }
    for (int n = 0; n < columns; ++n)
      row[n] = without_denormal(without_denormal(row[n]) + without_denormal(first[n] + second[n]));
    write_row_and_zero(tiles, sum, m, row);
  }
  zero_upper_rows(tiles, sum);
}

}  // namespace
}  // namespace CKDIST_ISA
}  // namespace ckdist
