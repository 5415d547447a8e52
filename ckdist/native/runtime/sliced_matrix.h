// A matrix in two states: slices that are ready lie packed in an arena; the rest is stored in its file.
//
// A slice is a few tiles. Its state is one byte: stored -> claimed -> ready. All ranks of a host share the states if
// they share the arena. The thread that claims a slice packs and publishes it. No thread waits for a slice: it can pack
// from the file if a slice is not ready.
#pragma once
#include <algorithm>

#include "runtime/stored_matrix.h"
#include "runtime/weight_arena.h"

namespace ckdist {

class SlicedMatrix {
 public:
  static constexpr int64_t kSliceBytes = 256 << 10;  // approximate packed size: an L2 cache keeps it during a product

  // Lies in the arena. Initially every slice is stored, and `left` is the number of slices.
  struct States {
    uint32_t left;  // slices that are not ready
    __extension__ uint8_t of[];
  };
  static int64_t tiles_each(const Matrix& shape) {
    return shape.tile_bytes ? std::max<int64_t>(1, kSliceBytes / shape.tile_bytes) : 1;
  }
  static int64_t count(const Matrix& shape) {
    return shape.tile_bytes ? (shape.tile_count() + tiles_each(shape) - 1) / tiles_each(shape) : 0;
  }
  static int64_t state_bytes(const Matrix& shape) { return (int64_t(sizeof(States)) + count(shape) + 63) / 64 * 64; }

  // `stored`, `arena` and the memory in it must outlive this object.
  SlicedMatrix(const StoredMatrix& stored, WeightArena& arena, uint8_t* tiles, States* states)
      : stored_(stored),
        arena_(arena),
        tiles_(tiles),
        states_(states),
        tiles_each_(tiles_each(stored.shape())),
        count_(count(stored.shape())) {}

  const StoredMatrix& stored() const { return stored_; }
  WeightArena& arena() const { return arena_; }
  uint8_t* tiles() const { return tiles_; }
  bool mapped() const { return tiles_ == nullptr; }  // never packed: only its stored rows are read
  int64_t count() const { return count_; }
  int64_t slice_of(int64_t tile) const { return tile / tiles_each_; }
  int64_t begin(int64_t slice) const {
    return std::min(slice * tiles_each_, stored_.shape().tile_count());
  }  // first tile of a slice
  int64_t bytes(int64_t slice) const { return (begin(slice + 1) - begin(slice)) * stored_.shape().tile_bytes; }
  int64_t largest_bytes() const { return count_ ? bytes(0) : 0; }
  uint8_t* place(int64_t slice) const { return tiles_ + begin(slice) * stored_.shape().tile_bytes; }

  bool whole() const { return left() == 0; }
  int64_t left() const { return __atomic_load_n(&states_->left, __ATOMIC_ACQUIRE); }
  bool ready(int64_t slice) const { return __atomic_load_n(states_->of + slice, __ATOMIC_ACQUIRE) == kReady; }
  bool claim(int64_t slice) const {
    uint8_t stored = kStored;
    return __atomic_load_n(states_->of + slice, __ATOMIC_RELAXED) == kStored &&
           __atomic_compare_exchange_n(states_->of + slice, &stored, uint8_t{kClaimed}, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }
  // Makes the bytes that the claiming thread wrote at place(slice) visible to all.
  void publish(int64_t slice) const {
    __atomic_store_n(states_->of + slice, uint8_t{kReady}, __ATOMIC_RELEASE);
    __atomic_sub_fetch(&states_->left, 1u, __ATOMIC_ACQ_REL);
  }
  // Takes over the slices that are ready in `before` (null: none). Returns their bytes.
  int64_t begin(const States* before) const {
    int64_t ready = 0, kept = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const bool is_ready = before && __atomic_load_n(before->of + i, __ATOMIC_ACQUIRE) == kReady;
      __atomic_store_n(states_->of + i, is_ready ? uint8_t{kReady} : uint8_t{kStored}, __ATOMIC_RELAXED);
      if (is_ready) ready++, kept += bytes(i);
    }
    __atomic_store_n(&states_->left, uint32_t(count_ - ready), __ATOMIC_RELEASE);
    return kept;
  }

 private:
  enum : uint8_t { kStored = 0, kClaimed = 1, kReady = 2 };

  const StoredMatrix& stored_;
  WeightArena& arena_;
  uint8_t* tiles_;
  States* states_;
  int64_t tiles_each_, count_;
};

// The operand of a product; has the same bytes as ckdist_matrix.
struct Weight {
  Matrix matrix;
  const SlicedMatrix* sliced;  // null: all tiles are packed and stay packed
  double scale = 0;            // of an adapter's matrix A in a slot: alpha / rank
};

}  // namespace ckdist
