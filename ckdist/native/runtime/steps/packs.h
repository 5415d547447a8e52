// Packed matrices for the products of training. The step that multiplies packs them into the workspace. Frozen matrices
// are packed once.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// The packs of one step: in place if they are packed once, else in carved memory.
template <int kCount>
struct StepPacks {
  int32_t index[kCount];
  Matrix matrix[kCount];
  int count = 0;

  void add(const Training& r, Carver& c, int32_t pack) {
    index[count] = pack;
    matrix[count] = r.packed(pack);
    if (!matrix[count].tiles) matrix[count].tiles = c.bytes(Training::bytes_of(matrix[count]));
    ++count;
  }
};

// Bytes of each thread's memory for packing.
int64_t pack_thread_bytes(const Training& r, int32_t pack);
// All threads pack `n` packs, at most 4, to the tiles of `matrices`.
void make_pack(Training& r, int thread, int index, const int32_t* packs, const Matrix* matrices, int n);

// Packs those matrices of a step that are not packed once.
template <int kCount>
void make_packs(Training& r, int thread, int index, const StepPacks<kCount>& packs) {
  int32_t fresh[kCount];
  Matrix matrices[kCount];
  int n = 0;
  for (int i = 0; i < packs.count; ++i)
    if (!r.packed(packs.index[i]).tiles) fresh[n] = packs.index[i], matrices[n++] = packs.matrix[i];
  if (n) make_pack(r, thread, index, fresh, matrices, n);
}

}  // namespace ckdist
