// A rank's shards of weights, from mapped model files into one arena of packed tiles.
//
// Everything is planned first; open() makes the arena and reads the vectors, and from then on the matrices can be
// multiplied with, packed or not. fill() begins to pack them.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "runtime/repacker.h"
#include "runtime/sliced_matrix.h"
#include "runtime/stored_matrix.h"
#include "runtime/weight_arena.h"

namespace ckdist {

class Loader {
 public:
  explicit Loader(const std::vector<std::string>& paths);
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  const MappedFile& file(int index) const;
  // Parts of this file still come in; to be said before it is read.
  void expect_writes(int index);

  // The indices by which matrix() and vector() give what was planned. `cold`: packed after all others.
  int add_matrix(StoredMatrix stored, bool cold);
  int add_vector(StoredVector stored);

  int64_t arena_bytes() const { return weight_bytes_ + state_bytes_; }
  int64_t source_bytes() const { return source_bytes_; }

  // `shared`: the arena can be mapped by other processes.
  void open(bool shared);
  const uint8_t* arena() const { return arena_ ? arena_->data() : nullptr; }
  // By which other processes of this host can map the arena, where it is shared; else empty.
  std::string path() const { return arena_ ? arena_->path() : std::string(); }

  const Weight& matrix(int index) const;
  const float* vector(int index) const;
  int64_t states_offset(int index) const { return weight_bytes_ + matrices_[index].states_offset; }

  // The arena of another rank of the host, by its path and arena_bytes(): the index by which it is known.
  int add_peer(const std::string& path, int64_t arena_bytes);
  const uint8_t* peer_arena(int peer) const { return peer_arenas_[peer].data(); }
  // A matrix that a peer packs, added before fill(): it lies in the peer's arena, and what is not packed yet is read
  // from this rank's files.
  const Weight& add_peer_matrix(int peer, StoredMatrix stored, int64_t tiles_offset, int64_t states_offset);

  void fill(Repacker::Way way);
  Repacker* repacker() { return repacker_.get(); }  // null before fill()

 private:
  struct PlannedMatrix {
    PlannedMatrix(StoredMatrix s, bool c) : stored(std::move(s)), cold(c) {}
    StoredMatrix stored;
    bool cold;
    int64_t tiles_offset = 0, states_offset = 0;  // the latter behind the weights
    std::unique_ptr<SlicedMatrix> sliced;
    Weight weight{};
  };
  struct PlannedVector {
    StoredVector stored;
    int64_t offset;
  };

  int64_t reserve(int64_t bytes, const std::string& name);
  void slice(PlannedMatrix& planned, WeightArena& arena, int64_t tiles, int64_t states);

  std::deque<MappedFile> files_;
  std::deque<PlannedMatrix> matrices_, peer_matrices_;
  std::vector<PlannedVector> vectors_;
  int64_t weight_bytes_ = 0, state_bytes_ = 0, source_bytes_ = 0;
  std::unique_ptr<WeightArena> arena_;
  std::deque<WeightArena> peer_arenas_;
  std::unique_ptr<Repacker> repacker_;  // last: its threads use all of the above
};

}  // namespace ckdist
