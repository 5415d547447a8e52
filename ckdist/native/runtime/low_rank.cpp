// What an adapter adds to a linear step's outputs.
#include <algorithm>

#include "runtime/executable.h"

namespace ckdist {

void Executable::low_rank(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int64_t n = rows(step);
  const bool gated = step.i[0];
  const uint8_t* x = activations(thread, step, step.in[0]);
  const int64_t x_stride = activation_stride(value(step.in[0]));
  int count = 0;
  int64_t columns[5] = {};  // where a matrix's stretch begins
  for (; count < 4 && step.out[count] >= 0; count++)
    columns[count + 1] = columns[count] + (step.matrix[count] < 0 ? 0 : matrix(step.matrix[count]).cols);

  auto add = [&](int m, int64_t tile, int64_t tiles, int64_t first, int64_t tokens) {
    const Matrix& w = matrix(step.matrix[m]);
    const int64_t from = tile * kTileRows, size = std::min(tiles * kTileRows, w.rows - from);
    const Matrix part{w.type, size, w.cols, w.tile_bytes, w.tiles + tile * w.tile_bytes};
    float* const sums = workers_[thread].sums;
    kernels_.linear[int(w.type)].multiply(part, 0, tiles, x + first * x_stride + columns[m] * 4, x_stride, tokens, sums,
                                          kLowTiles * kTileRows);
    int64_t stride;
    float* const y = floats(step.out[m], &stride) + first * stride + from;
    for (int64_t t = 0; t < tokens; t++)
      kernels_.elementwise.add(sums + t * kLowTiles * kTileRows, size, y + t * stride);
  };
  int64_t item = counters_[index].fetch_add(1), before = 0;  // before: items of earlier matrices
  for (int m = 0; m < (gated ? 1 : count); m++) {
    if (!gated && step.matrix[m] < 0) continue;
    const int64_t width = value(step.out[m]).width, all = (width + kTileRows - 1) / kTileRows,
                  items = (all + kLowTiles - 1) / kLowTiles;
    for (; item < before + items; item = counters_[index].fetch_add(1)) {
      const int64_t tile = (item - before) * kLowTiles, tiles = std::min(kLowTiles, all - tile),
                    from = tile * kTileRows;
      for (int64_t first = 0; first < n; first += kLowTokens) {
        const int64_t tokens = std::min(kLowTokens, n - first);
        for (int k = m; k < (gated ? 2 : m + 1); k++)
          if (step.matrix[k] >= 0) add(k, tile, tiles, first, tokens);
        if (!gated) continue;
        int64_t gate_stride, up_stride;
        float* const gate = floats(step.out[0], &gate_stride) + from;
        const float* const up = floats(step.out[1], &up_stride) + from;
        for (int64_t t = first; t < first + tokens; t++)
          kernels_.elementwise.gated(GateFunction(step.i[1]), gate + t * gate_stride, up + t * up_stride,
                                     std::min(tiles * kTileRows, width - from), gate + t * gate_stride);
      }
    }
    before += items;
  }
  finish(thread, index, n);
}

}  // namespace ckdist
