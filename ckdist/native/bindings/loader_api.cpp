#include "core/export.h"

#include "api/loader.h"

#include <cstddef>

#include "runtime/loader.h"

using ckdist::Loader;
using ckdist::Matrix;
using ckdist::Status;
using ckdist::Type;

static_assert(sizeof(ckdist_matrix) == sizeof(Matrix) && offsetof(ckdist_matrix, rows) == offsetof(Matrix, rows) &&
                  offsetof(ckdist_matrix, cols) == offsetof(Matrix, cols) &&
                  offsetof(ckdist_matrix, tile_bytes) == offsetof(Matrix, tile_bytes) &&
                  offsetof(ckdist_matrix, tiles) == offsetof(Matrix, tiles),
              "ckdist_matrix must be Matrix");

struct ckdist_loader {
  explicit ckdist_loader(const std::vector<std::string>& paths) : loader(paths) {}
  Loader loader;
};

struct ckdist_peer_arena {
  ckdist::Segment segment;
};

extern "C" {

int ckdist_loader_create(const char* const* paths, int path_count, ckdist_loader** out) {
  return ckdist::guard([&] { *out = new ckdist_loader(std::vector<std::string>(paths, paths + path_count)); });
}

void ckdist_loader_free(ckdist_loader* loader) { delete loader; }

int ckdist_loader_add_matrix(ckdist_loader* loader, const ckdist_matrix_plan* plan) {
  int index = 0;
  const int status = ckdist::guard([&] {
    std::vector<Loader::RowRange> ranges;
    for (int64_t i = 0; i < plan->range_count; ++i) ranges.push_back({plan->row_ranges[2 * i], plan->row_ranges[2 * i + 1]});
    const Loader::Source source{plan->name,   plan->file, static_cast<Type>(plan->source_type), plan->offset,
                                plan->rows,   plan->cols, plan->head_rows};
    index = loader->loader.add_matrix(source, static_cast<Type>(plan->packed_type), ranges, plan->col_begin, plan->col_end);
  });
  return status < 0 ? status : index;
}

int ckdist_loader_add_vector(ckdist_loader* loader, const ckdist_vector_plan* plan) {
  int index = 0;
  const int status = ckdist::guard([&] {
    const Loader::Source source{plan->name, plan->file, static_cast<Type>(plan->source_type), plan->offset, plan->size, 1, plan->head_rows};
    index = loader->loader.add_vector(source, plan->begin, plan->end, plan->plus_one != 0);
  });
  return status < 0 ? status : index;
}

const void* ckdist_loader_arena(const ckdist_loader* loader) { return loader->loader.arena(); }
int64_t ckdist_loader_arena_bytes(const ckdist_loader* loader) { return loader->loader.arena_bytes(); }
int64_t ckdist_loader_source_bytes(const ckdist_loader* loader) { return loader->loader.source_bytes(); }
int64_t ckdist_loader_progress(const ckdist_loader* loader) { return loader->loader.progress(); }

int ckdist_loader_start(ckdist_loader* loader, int threads, int shared) {
  return ckdist::guard([&] { loader->loader.start(threads, shared != 0); });
}

const char* ckdist_loader_path(const ckdist_loader* loader) {
  static thread_local std::string path;
  return (path = loader->loader.path()).c_str();
}

int ckdist_peer_arena_open(const char* path, int64_t bytes, ckdist_peer_arena** out) {
  return ckdist::guard([&] { *out = new ckdist_peer_arena{ckdist::Segment(path, Loader::shared_bytes(bytes))}; });
}

void ckdist_peer_arena_close(ckdist_peer_arena* arena) { delete arena; }

const void* ckdist_peer_arena_data(const ckdist_peer_arena* arena) { return arena->segment.data(); }

int ckdist_loader_wait(ckdist_loader* loader, int milliseconds) {
  bool done = false;
  const int status = ckdist::guard([&] { done = loader->loader.wait(milliseconds); });
  return status < 0 ? status : done;
}

const ckdist_matrix* ckdist_loader_matrix(const ckdist_loader* loader, int index) {
  const ckdist_matrix* matrix = nullptr;
  ckdist::guard([&] { matrix = reinterpret_cast<const ckdist_matrix*>(&loader->loader.matrix(index)); });
  return matrix;
}

const float* ckdist_loader_vector(const ckdist_loader* loader, int index) {
  const float* vector = nullptr;
  ckdist::guard([&] { vector = loader->loader.vector(index); });
  return vector;
}

}
