#include "runtime/steps/packs.h"

#include <algorithm>

#include "core/futex.h"

namespace ckdist {

namespace {

constexpr int64_t kPackTiles = 8, kPackRows = 32;  // tiles of an item; rows packed transposed at a time

int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// One item of a pack: some tiles of it. If a transposed parameter must be unpacked first, whole rows of the parameter.
struct PackItem {
  Training& r;
  const int thread;
  const ckdist_pack& pack;
  const Matrix& matrix;

  static bool by_rows(const Training& r, const ckdist_pack& p) {
    return p.transposed && std::any_of(p.parameters, p.parameters + p.count,
                                       [&](int32_t w) { return r.packed_parameter(w) != nullptr; });
  }
  static int64_t count(const Training& r, const ckdist_pack& p, const Matrix& m) {
    if (!by_rows(r, p)) return (m.tile_count() + kPackTiles - 1) / kPackTiles;
    int64_t items = 0;
    for (int part = 0; part < p.count; ++part) items += (r.shape(p.parameters[part]).rows + kPackRows - 1) / kPackRows;
    return items;
  }

  void run(int64_t item) {
    if (by_rows(r, pack)) return make_rows(item);
    const int64_t begin = item * kPackTiles, end = std::min(begin + kPackTiles, matrix.tile_count());
    int64_t column = 0;
    for (int part = 0; part < pack.count; ++part) {
      const int32_t w = pack.parameters[part];
      if (!pack.transposed) make_tiles(w, begin, end);
      else
        // A few rows at a time: the parts of a row in the tiles lie side by side.
        for (int64_t row = 0; row < r.shape(w).rows; row += kPackRows)
          make_columns(r.parameter(w) + row * r.shape(w).cols, w, row, column + row, begin, end);
      column += round16(r.shape(w).rows);
    }
  }

  int rows_of(int64_t tile) const { return int(std::min<int64_t>(kTileRows, matrix.rows - tile * kTileRows)); }
  uint8_t* place(int64_t tile) const { return const_cast<uint8_t*>(matrix.tiles) + tile * matrix.tile_bytes; }

  void make_tiles(int32_t w, int64_t begin, int64_t end) {
    const int64_t cols = r.shape(w).cols;
    for (int64_t tile = begin; tile < end; ++tile)
      r.packing.rows(rows(w, tile * kTileRows, rows_of(tile)), cols, rows_of(tile), cols, place(tile));
  }

  // Packs rows [row, row + kPackRows) of parameter `w`, (rows, cols) at `x`, as columns of tiles from `column` on.
  void make_columns(const float* x, int32_t w, int64_t row, int64_t column, int64_t begin, int64_t end) {
    const int64_t cols = r.shape(w).cols, n = std::min(kPackRows, r.shape(w).rows - row);
    for (int64_t tile = begin; tile < end; ++tile)
      r.packing.columns(x + tile * kTileRows, cols, rows_of(tile), n, place(tile) + column * r.column_bytes());
  }

  void make_rows(int64_t item) {
    int64_t column = 0;
    for (int part = 0; part < pack.count; ++part) {
      const int32_t w = pack.parameters[part];
      const int64_t items = (r.shape(w).rows + kPackRows - 1) / kPackRows, row = item * kPackRows;
      if (item < items) {
        const float* const x = rows(w, row, std::min(kPackRows, r.shape(w).rows - row));
        return make_columns(x, w, row, column + row, 0, matrix.tile_count());
      }
      item -= items, column += round16(r.shape(w).rows);
    }
  }

  const float* rows(int32_t w, int64_t begin, int64_t n) {
    return r.parameter_rows(w, begin, n, reinterpret_cast<float*>(r.memory(thread)));
  }
};

}  // namespace

int64_t pack_thread_bytes(const Training& r, int32_t pack) {
  int64_t bytes = 0;
  for (int part = 0; part < r.pack(pack).count; ++part) {
    const int32_t w = r.pack(pack).parameters[part];
    if (r.packed_parameter(w)) bytes = std::max(bytes, kPackRows * r.shape(w).cols * 4);
  }
  return bytes;
}

void make_pack(Training& r, int thread, int index, const int32_t* packs, const Matrix* matrices, int n) {
  const int64_t start = now_ns();
  int64_t items[5] = {0};
  for (int i = 0; i < n; ++i) items[i + 1] = items[i] + PackItem::count(r, r.pack(packs[i]), matrices[i]);
  r.parallel_for(thread, index, items[n], [&](int64_t item) {
    int i = 0;
    while (item >= items[i + 1]) ++i;
    PackItem{r, thread, r.pack(packs[i]), matrices[i]}.run(item - items[i]);
  });
  if (thread == 0) r.count_packing(double(now_ns() - start) * 1e-9);
}

}  // namespace ckdist
