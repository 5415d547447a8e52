// Loads a rank's shards of weights from mapped model files into one arena of packed tiles.
//
// First all weights are planned. open() allocates the arena and reads the vectors; then steps can multiply with the
// matrices, packed or not. fill() starts packing.
#pragma once
#include <deque>

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
  // Announces that parts of this file are still being written. Call it before the file is read.
  void expect_writes(int index);

  // Return the indices for matrix() and vector(). `cold`: packed after all others. `mapped`: never packed; steps read
  // rows in the file.
  int add_matrix(StoredMatrix stored, bool cold, bool mapped);
  int add_vector(StoredVector stored);

  int64_t arena_bytes() const { return weight_bytes_ + 2 * state_bytes_; }
  int64_t source_bytes() const { return source_bytes_; }

  // `shared`: other processes can map the arena. `kept`: the path of an arena that a loader with the same plan has
  // filled, perhaps in part; or empty.
  void open(bool shared, const std::string& kept);
  int64_t kept_bytes() const { return kept_bytes_; }  // bytes of slices that were packed before open()
  const uint8_t* arena() const { return arena_ ? arena_->data() : nullptr; }
  // The path for mapping the arena in other processes of this host. Empty if it is not shared.
  std::string path() const { return arena_ ? arena_->path() : std::string(); }

  const Weight& matrix(int index) const;
  const float* vector(int index) const;
  int64_t states_offset(int index) const { return weight_bytes_ + states_ + matrices_[index].states_offset; }

  // Maps the arena of another rank of the host, by its path and arena_bytes(). Returns the peer's index.
  int add_peer(const std::string& path, int64_t arena_bytes);
  const uint8_t* peer_arena(int peer) const { return peer_arenas_[peer].data(); }
  // Adds a matrix that a peer packs into its arena, before fill(). Tiles that are not packed yet are read from this
  // rank's files.
  const Weight& add_peer_matrix(int peer, StoredMatrix stored, int64_t tiles_offset, int64_t states_offset);

  void fill(Repacker::Way way);
  Repacker* repacker() { return repacker_.get(); }  // null before fill()

 private:
  struct PlannedMatrix {
    StoredMatrix stored;
    bool cold, mapped;
    int64_t tiles_offset = 0, states_offset = 0;  // states lie after the weights
    std::unique_ptr<SlicedMatrix> sliced = nullptr;
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
  int64_t weight_bytes_ = 0, state_bytes_ = 0, source_bytes_ = 0, kept_bytes_ = 0;
  int64_t states_ = 0;  // offset of the states in use: those of a kept arena have two places
  std::unique_ptr<WeightArena> arena_;
  std::deque<WeightArena> peer_arenas_;
  std::unique_ptr<Repacker> repacker_;  // last member: its threads use all of the above
};

}  // namespace ckdist
