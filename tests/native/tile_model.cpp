// State of the model of tiles, and C functions for its tests.
#include "api/export.h"
#include "kernels/isa/tile.h"
#include "kernels/kernels.h"

namespace ckdist {
TileCounts tile_counts;
thread_local TileModel tile_model;
}  // namespace ckdist

using namespace ckdist;

// Operations of all threads since the start: loads, stores, products, rows of sums in products.
CKDIST_EXPORT void tile_operations(int64_t* out) {
  out[0] = tile_counts.loads, out[1] = tile_counts.stores;
  out[2] = tile_counts.products, out[3] = tile_counts.rows;
}

// Whether this thread's tiles are configured.
CKDIST_EXPORT int tiles_are_live() { return tile_model.configured; }

// ckdist_multiply with the kernel of prompts.
CKDIST_EXPORT void tile_multiply_prompt(int type, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t begin,
                                        int64_t end, const uint8_t* x, int64_t x_stride, int strips, int64_t tokens,
                                        float* y) {
  static std::vector<uint8_t> room(kPromptBytes + 64);
  const LinearKernel& kernel = kernels_named("amx").linear[type];
  kernel.multiply_prompt({static_cast<Type>(type), rows, cols, kernel.tile_bytes(cols), tiles}, begin, end, x, x_stride,
                         strips != 0, tokens, y, rows,
                         room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63));
}

CKDIST_EXPORT int64_t tile_peak(int format, int64_t rounds) {
  uint64_t sink = 0;
  return kernels_named("amx").machine.multiply_add(static_cast<ActivationFormat>(format), rounds, &sink);
}
