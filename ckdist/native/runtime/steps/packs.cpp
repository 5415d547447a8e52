#include "runtime/steps/packs.h"

#include "runtime/steps/part_products.h"

namespace ckdist {

namespace {

// Tiles of an item, and rows of an item that is packed transposed. They are few, so that all threads have items.
constexpr int64_t kPackTiles = 2, kPackRows = 32;

int64_t items_of(const Training& r, const ckdist_pack& p, const Matrix& m) {
  if (!p.transposed) return parts_of(m.tile_count(), kPackTiles);
  int64_t items = 0;
  for (int part = 0; part < p.count; ++part) items += parts_of(r.shape(p.parameters[part]).rows, kPackRows);
  return items;
}

// Packs one item: some tiles, or some whole rows of a parameter that is packed transposed.
void pack_item(const Training& r, int thread, const ckdist_pack& pack, const Matrix& matrix, int64_t item) {
  const PartProducts parts(r, reinterpret_cast<float*>(r.memory(thread)));
  uint8_t* const tiles = const_cast<uint8_t*>(matrix.tiles);
  if (!pack.transposed) {
    const int64_t row = item * kPackTiles * kTileRows, n = std::min(kPackTiles * kTileRows, matrix.rows - row);
    parts.pack({pack.parameters[0], row, n, 0, matrix.cols}, tiles + item * kPackTiles * matrix.tile_bytes);
    return;
  }
  int64_t column = 0;
  for (int part = 0; part < pack.count; ++part) {
    const int64_t all = r.shape(pack.parameters[part]).rows, items = parts_of(all, kPackRows);
    if (item < items) {
      const int64_t row = item * kPackRows;
      parts.pack_transposed({pack.parameters[part], row, std::min(kPackRows, all - row), 0, matrix.rows},
                            tiles + (column + row) * r.column_bytes(), matrix.tile_bytes);
      return;
    }
    item -= items, column += round16(all);
  }
}

}  // namespace

int64_t pack_thread_bytes(const Training& r, int32_t pack) {
  int64_t bytes = 0;
  for (int part = 0; part < r.pack(pack).count; ++part)
    bytes = std::max(bytes, PartProducts::unpacked_floats(r, r.pack(pack).parameters[part]) * 4);
  return bytes;
}

void make_packs(Training& r, int thread, int index, const StepPacks& packs) {
  if (packs.count == 0) return;
  const int64_t start = now_ns();
  int64_t items[StepPacks::kMost + 1] = {0};
  for (int i = 0; i < packs.count; ++i) items[i + 1] = items[i] + items_of(r, r.pack(packs.index[i]), packs.matrix[i]);
  r.parallel_for(thread, index, items[packs.count], [&](int64_t item) {
    int i = 0;
    while (item >= items[i + 1]) ++i;
    pack_item(r, thread, r.pack(packs.index[i]), packs.matrix[i], item - items[i]);
  });
  if (thread == 0) r.count_packing(double(now_ns() - start) * 1e-9);
}

}  // namespace ckdist
