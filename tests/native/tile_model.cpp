// State of the model of tiles, and what tests read of it.
#include "kernels/isa/tile.h"

namespace ckdist {
TileCounts tile_counts;
thread_local TileModel tile_model;
}  // namespace ckdist

extern "C" {
// Operations of all threads since the start: loads, stores, products, rows of sums in products.
__attribute__((visibility("default"))) void ckdist_tile_counts(int64_t* out) {
  const auto& counts = ckdist::tile_counts;
  out[0] = counts.loads, out[1] = counts.stores, out[2] = counts.products, out[3] = counts.rows;
}
// Whether this thread's tiles are configured.
__attribute__((visibility("default"))) int ckdist_tiles_live(void) { return ckdist::tile_model.configured; }
}
