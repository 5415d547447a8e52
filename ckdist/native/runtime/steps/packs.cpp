#include "runtime/steps/packs.h"

#include <algorithm>

#include "core/futex.h"

namespace ckdist {

namespace {

// Tiles of an item, and rows of an item that is packed transposed. They are few, so that all threads have items.
constexpr int64_t kPackTiles = 2, kPackRows = 32;

int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// One item of a pack: some tiles of it, or some whole rows of a parameter that is packed transposed.
struct PackItem {
  Training& r;
  const int thread;
  const ckdist_pack& pack;
  const Matrix& matrix;

  static int64_t count(const Training& r, const ckdist_pack& p, const Matrix& m) {
    if (!p.transposed) return (m.tile_count() + kPackTiles - 1) / kPackTiles;
    int64_t items = 0;
    for (int part = 0; part < p.count; ++part) items += (r.shape(p.parameters[part]).rows + kPackRows - 1) / kPackRows;
    return items;
  }

  void run(int64_t item) {
    if (pack.transposed) return make_columns(item);
    const int64_t begin = item * kPackTiles, end = std::min(begin + kPackTiles, matrix.tile_count());
    for (int part = 0; part < pack.count; ++part) make_tiles(pack.parameters[part], begin, end);
  }

  int rows_of(int64_t tile) const { return int(std::min<int64_t>(kTileRows, matrix.rows - tile * kTileRows)); }
  uint8_t* place(int64_t tile) const { return const_cast<uint8_t*>(matrix.tiles) + tile * matrix.tile_bytes; }

  void make_tiles(int32_t w, int64_t begin, int64_t end) {
    const int64_t cols = r.shape(w).cols;
    for (int64_t tile = begin; tile < end; ++tile)
      r.packing.rows(rows(w, tile * kTileRows, rows_of(tile)), cols, rows_of(tile), cols, place(tile));
  }

  // The parts of a row in the tiles lie side by side, so some rows are packed at a time, as columns of tiles.
  void make_columns(int64_t item) {
    int64_t column = 0;
    for (int part = 0; part < pack.count; ++part) {
      const int32_t w = pack.parameters[part];
      const int64_t cols = r.shape(w).cols, all = r.shape(w).rows, items = (all + kPackRows - 1) / kPackRows;
      if (item < items) {
        const int64_t row = item * kPackRows, n = std::min(kPackRows, all - row);
        const float* const x = rows(w, row, n);
        for (int64_t tile = 0; tile < matrix.tile_count(); ++tile)
          r.packing.columns(x + tile * kTileRows, cols, rows_of(tile), n,
                            place(tile) + (column + row) * r.column_bytes());
        return;
      }
      item -= items, column += round16(all);
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
    if (!r.in_place(w)) bytes = std::max(bytes, kPackRows * r.shape(w).cols * 4);
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
