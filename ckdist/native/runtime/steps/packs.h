// Packed matrices for the products of training. The step that multiplies packs them into the workspace. Frozen matrices
// are packed once.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// The packs that a step makes in carved memory.
struct StepPacks {
  static constexpr int kMost = 4;
  int32_t index[kMost];
  Matrix matrix[kMost];
  int count = 0;

  // Adds a pack and returns its matrix, which is made by make_packs() unless it is packed once.
  Matrix add(const Training& r, Carver& c, int32_t pack) {
    Matrix m = r.packed(pack);
    if (m.tiles != nullptr) return m;
    m.tiles = c.bytes(Training::bytes_of(m));
    index[count] = pack, matrix[count++] = m;
    return m;
  }
};

// Bytes of each thread's memory for packing.
int64_t pack_thread_bytes(const Training& r, int32_t pack);
// All threads pack those matrices.
void make_packs(Training& r, int thread, int index, const StepPacks& packs);

}  // namespace ckdist
