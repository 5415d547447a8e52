#include "runtime/loader.h"

#include <cinttypes>

namespace ckdist {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int kMaxThreads = 4096;  // as --threads

template <class List>
auto& element(List& list, int index, const char* name) {
  if (index < 0 || index >= int(list.size())) fail(Status::native, "%s %d of %zu", name, index, list.size());
  return list[size_t(index)];
}

}  // namespace

Loader::Loader(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) files_.emplace_back(path);
}

void Loader::expect_writes(int index) { element(files_, index, "file").expect_writes(); }

const MappedFile& Loader::file(int index) const { return element(files_, index, "file"); }

int64_t Loader::reserve(int64_t bytes, const std::string& name) {
  if (arena_) fail(Status::native, "%s was added to a loader that is open", name.c_str());
  const int64_t offset = weight_bytes_;
  if (bytes > INT64_MAX / 2 - offset)
    fail(Status::capacity, "the weights need more than %" PRId64 " bytes", INT64_MAX / 2);
  weight_bytes_ = (offset + bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  return offset;
}

int Loader::add_matrix(StoredMatrix stored, bool cold, bool mapped) {
  PlannedMatrix planned{std::move(stored), cold, mapped};
  if (!mapped) {
    const Matrix& shape = planned.stored.shape();
    const std::string& name = planned.stored.source().name;
    int64_t bytes;
    if (__builtin_mul_overflow(shape.tile_count(), shape.tile_bytes, &bytes))
      fail(Status::capacity, "%s needs more than %" PRId64 " bytes", name.c_str(), INT64_MAX);
    planned.tiles_offset = reserve(bytes, name), planned.states_offset = state_bytes_;
    state_bytes_ += SlicedMatrix::state_bytes(shape);
    source_bytes_ += planned.stored.stored_bytes();
  }
  matrices_.push_back(std::move(planned));
  return int(matrices_.size()) - 1;
}

int Loader::add_vector(StoredVector stored) {
  stored.check();
  source_bytes_ += stored.stored_bytes();
  const int64_t offset = reserve((stored.end - stored.begin) * int64_t(sizeof(float)), stored.source.name);
  vectors_.push_back({std::move(stored), offset});
  return int(vectors_.size()) - 1;
}

void Loader::slice(PlannedMatrix& planned, WeightArena& arena, int64_t tiles, int64_t states) {
  uint8_t* const data = arena.data();
  planned.weight.matrix = planned.stored.shape();
  planned.weight.matrix.tiles = planned.mapped ? nullptr : data + tiles;
  planned.sliced = std::make_unique<SlicedMatrix>(planned.stored, arena, planned.mapped ? nullptr : data + tiles,
                                                  reinterpret_cast<SlicedMatrix::States*>(data + states));
  planned.weight.sliced = planned.sliced.get();
}

// States lie after the weights: they touch few pages and leave the others to the packing threads. Each start on a kept
// arena uses the other of two copies. A rank of the last start that is still ending changes the old copy only, and the
// tiles that it writes have the same bytes.
void Loader::open(bool shared, const std::string& path) {
  if (arena_) fail(Status::native, "the loader is open already");
  const bool again = !path.empty();
  arena_ =
      again ? std::make_unique<WeightArena>(path, arena_bytes()) : std::make_unique<WeightArena>(arena_bytes(), shared);
  WeightArena::Kept* const kept = arena_->kept();
  const uint32_t last = again ? __atomic_load_n(&kept->states, __ATOMIC_ACQUIRE) & 1 : 1;
  const bool usable = again && !__atomic_load_n(&kept->damaged, __ATOMIC_ACQUIRE);
  states_ = last ? 0 : state_bytes_;
  int64_t left = 0;
  for (PlannedMatrix& planned : matrices_) {
    const uint8_t* const before = arena_->data() + weight_bytes_ + last * state_bytes_ + planned.states_offset;
    slice(planned, *arena_, planned.tiles_offset, weight_bytes_ + states_ + planned.states_offset);
    if (planned.mapped) continue;
    const Matrix& shape = planned.stored.shape();
    const int64_t packed =
        planned.sliced->begin(usable ? reinterpret_cast<const SlicedMatrix::States*>(before) : nullptr);
    kept_bytes_ += packed, left += shape.tile_count() * shape.tile_bytes - packed;
  }
  if (again) {
    __atomic_store_n(&kept->states, 1 - last, __ATOMIC_RELEASE);
    __atomic_store_n(&kept->damaged, 0u, __ATOMIC_RELEASE);  // last: the old states may name damaged slices
    arena_->promise(left);
  }
  for (const PlannedVector& planned : vectors_)
    planned.stored.read(reinterpret_cast<float*>(arena_->data() + planned.offset));
  for (const MappedFile& file : files_) file.check();
}

const Weight& Loader::matrix(int index) const { return element(matrices_, index, "matrix").weight; }

const float* Loader::vector(int index) const {
  return reinterpret_cast<const float*>(arena_->data() + element(vectors_, index, "vector").offset);
}

int Loader::add_peer(const std::string& path, int64_t arena_bytes) {
  peer_arenas_.emplace_back(path, arena_bytes);
  return int(peer_arenas_.size()) - 1;
}

const Weight& Loader::add_peer_matrix(int peer, StoredMatrix stored, int64_t tiles_offset, int64_t states_offset) {
  if (repacker_) fail(Status::native, "%s was added to a loader that is filling", stored.source().name.c_str());
  peer_matrices_.push_back({std::move(stored), false, false});
  slice(peer_matrices_.back(), peer_arenas_[peer], tiles_offset, states_offset);
  return peer_matrices_.back().weight;
}

// Packs in the order of execution. If all threads pack at once, in the order of the files.
void Loader::fill(Repacker::Way way) {
  if (!arena_ || repacker_) fail(Status::native, "the loader %s", arena_ ? "is filling already" : "is not open");
  if (way.threads < 1 || way.threads > kMaxThreads)
    fail(Status::config, "%d loading threads: use 1 to %d", way.threads, kMaxThreads);
  std::vector<const PlannedMatrix*> order;
  for (const PlannedMatrix& planned : matrices_)
    if (!planned.mapped) order.push_back(&planned);
  if (way.background)
    std::stable_sort(order.begin(), order.end(),
                     [](const PlannedMatrix* a, const PlannedMatrix* b) { return a->cold < b->cold; });
  else
    std::stable_sort(order.begin(), order.end(), [](const PlannedMatrix* a, const PlannedMatrix* b) {
      const Source &x = a->stored.source(), &y = b->stored.source();
      return &x.file() != &y.file() ? x.file().path() < y.file().path() : x.offset() < y.offset();
    });
  std::vector<const SlicedMatrix*> own, others;
  for (const PlannedMatrix* planned : order) own.push_back(planned->sliced.get());
  for (const PlannedMatrix& planned : peer_matrices_) others.push_back(planned.sliced.get());
  std::vector<const MappedFile*> files;
  for (const MappedFile& file : files_) files.push_back(&file);
  repacker_ = std::make_unique<Repacker>(way, std::move(own), std::move(others), std::move(files));
}

}  // namespace ckdist
