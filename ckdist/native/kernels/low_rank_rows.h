// Products of single rows with LoRA's matrices A and B, in float32 or float16. The sums have the bits of
// `LinearKernel::multiply`. Several are computed at a time: one alone waits for each of its additions.
#pragma once
#include <cstdint>

namespace ckdist {

// y[i] = dot(row i of the tile, x) for its 16 rows.
struct TileProduct {
  const uint8_t* tile;
  const float* x;
  float* y;
};

struct LowRankKernel {
  // `halves`: tiles have float16. `cols`: columns of every tile, whose padding is multiplied, too.
  void (*multiply)(bool halves, const TileProduct* products, int64_t count, int64_t cols);
  // y[i] += dot(row i of the tiles, x) for the first `rows` rows.
  void (*add)(bool halves, const uint8_t* tiles, int64_t tile_bytes, int64_t rows, int64_t cols, const float* x,
              float* y);
};

}  // namespace ckdist
