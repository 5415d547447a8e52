// Packed tiles of a weight for products: from the arena if they are ready, else packed by the calling thread.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

// Calls product(part, first) for consecutive parts of tiles [begin, end). A part is a matrix of packed tiles; its first
// tile is tile `first` of the weight. Slices that are not ready are packed one at a time, and kept if the repacker
// allows it.
template <class Product>
void each_packed(Inference& r, int thread, const Weight& weight, int64_t begin, int64_t end, Product&& product) {
  const auto part = [&](const uint8_t* tiles, int64_t from, int64_t to) {
    const Matrix& w = weight.matrix;
    product(Matrix{w.type, std::min((to - from) * kTileRows, w.rows - from * kTileRows), w.cols, w.tile_bytes, tiles},
            from);
  };
  const SlicedMatrix* const sliced = weight.sliced;
  const int64_t tile_bytes = weight.matrix.tile_bytes;
  if (!sliced || sliced->whole()) return part(weight.matrix.tiles + begin * tile_bytes, begin, end);
  uint8_t* const room = r.slice(thread);
  for (int64_t tile = begin, next; tile < end; tile = next) {
    int64_t slice = sliced->slice_of(tile);
    next = std::min(end, sliced->begin(slice + 1));
    if (sliced->ready(slice)) {
      while (next < end && sliced->ready(++slice)) next = std::min(end, sliced->begin(slice + 1));
      part(weight.matrix.tiles + tile * tile_bytes, tile, next);
    } else if (r.repacker()->claim(*sliced, slice)) {
      sliced->stored().pack(sliced->begin(slice), sliced->begin(slice + 1), room);
      part(room + (tile - sliced->begin(slice)) * tile_bytes, tile, next);
      r.repacker()->keep(*sliced, slice, room);
    } else {
      sliced->stored().pack(tile, next, room);
      part(room, tile, next);
    }
  }
}

// Prefetch for waiting threads: at most `most` bytes of the packed tiles [begin, end).
inline void read_ahead(const Weight& weight, int64_t begin, int64_t end, int64_t most, Ahead& ahead) {
  if (weight.sliced && !weight.sliced->whole()) {
    const int64_t slice = weight.sliced->slice_of(begin);
    end = weight.sliced->ready(slice) ? std::min(end, weight.sliced->begin(slice + 1)) : begin;
  }
  ahead.at = weight.matrix.tiles + begin * weight.matrix.tile_bytes;
  ahead.end = ahead.at + std::min((end - begin) * weight.matrix.tile_bytes, most);
}

// Reads one row of a weight in float32.
inline void unpack_row(Inference& r, int thread, const Weight& weight, int64_t row, float* out) {
  const Matrix& w = weight.matrix;
  const LinearKernel& kernel = r.kernels.linear[int(w.type)];
  const SlicedMatrix* const sliced = weight.sliced;
  if (sliced && !sliced->whole() && !sliced->ready(sliced->slice_of(row / kTileRows))) {
    sliced->stored().pack_row(row, r.slice(thread));
    kernel.unpack_row(r.slice(thread), 0, w.cols, out);
  } else {
    kernel.unpack_row(w.tiles + row / kTileRows * w.tile_bytes, int(row % kTileRows), w.cols, out);
  }
}

}  // namespace ckdist
