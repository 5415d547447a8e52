// Matrices as the products of training read them: packed by the step that multiplies with them, into the workspace, or
// once where they are frozen.
#pragma once
#include "runtime/training.h"

namespace ckdist {

// The packs of one step, in place where they are made once, else carved.
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

// Bytes of a thread's memory that making packs takes.
int64_t pack_thread_bytes(const Training& r, int32_t pack);
// All threads make `n` packs, at most 4, at the tiles of `matrices`.
void make_pack(Training& r, int thread, int index, const int32_t* packs, const Matrix* matrices, int n);

// Makes those of a step that are not made once.
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
