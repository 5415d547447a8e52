#include "api/loader_api.h"

#include <cstddef>

#include "bindings/loader_handle.h"
#include "bindings/trace_handle.h"

using ckdist::Loader;
using ckdist::Matrix;
using ckdist::Repacker;
using ckdist::RowRange;
using ckdist::StoredMatrix;
using ckdist::Type;
using ckdist::Weight;

static_assert(sizeof(ckdist_matrix) == sizeof(Weight) && offsetof(ckdist_matrix, rows) == offsetof(Matrix, rows) &&
                  offsetof(ckdist_matrix, cols) == offsetof(Matrix, cols) &&
                  offsetof(ckdist_matrix, tile_bytes) == offsetof(Matrix, tile_bytes) &&
                  offsetof(ckdist_matrix, tiles) == offsetof(Matrix, tiles) &&
                  offsetof(ckdist_matrix, first_column) == offsetof(Matrix, first_column) &&
                  offsetof(ckdist_matrix, row_columns) == offsetof(Matrix, row_columns) &&
                  offsetof(ckdist_matrix, sliced) == offsetof(Weight, sliced) &&
                  offsetof(ckdist_matrix, scale) == offsetof(Weight, scale),
              "ckdist_matrix must be Weight");

namespace {

std::vector<ckdist::FilePlace> places_of(const Loader& loader, const int32_t* files, const int64_t* offsets,
                                         int64_t count) {
  std::vector<ckdist::FilePlace> places;
  for (int64_t i = 0; files && i < count; ++i) places.push_back({&loader.file(files[i]), offsets[i]});
  return places;
}

ckdist::Scales scales_of(const Loader& loader, const ckdist_scales& s, int64_t count) {
  return {static_cast<ckdist::CodeForm>(s.codes),
          static_cast<ckdist::ScaleForm>(s.form),
          s.rows_each,
          s.cols_each,
          s.rows,
          s.cols,
          s.first_row,
          places_of(loader, s.files, s.offsets, count),
          places_of(loader, s.zero_files, s.zero_offsets, count),
          static_cast<uint32_t>(s.zero_added),
          s.order ? std::vector<int32_t>(s.order, s.order + s.order_count) : std::vector<int32_t>(),
          s.factors ? std::vector<float>(s.factors, s.factors + count) : std::vector<float>()};
}

StoredMatrix stored_matrix(const Loader& loader, const ckdist_matrix_plan& plan) {
  std::vector<RowRange> ranges;
  for (int64_t i = 0; i < plan.range_count; ++i) ranges.push_back({plan.row_ranges[2 * i], plan.row_ranges[2 * i + 1]});
  std::vector<ckdist::FilePlace> places = places_of(loader, plan.files, plan.offsets, plan.count);
  if (places.empty()) ckdist::fail(ckdist::Status::native, "%s has no matrix", plan.name);
  const ckdist_head_part& part = plan.part;
  ckdist::Source source{
      plan.name,
      std::move(places),
      static_cast<Type>(plan.source_type),
      plan.rows,
      plan.cols,
      plan.head_rows,
      {part.stored, part.first, part.rows, part.columns, part.transposed != 0, part.every, part.lane, part.width},
      plan.scales ? scales_of(loader, *plan.scales, plan.count) : ckdist::Scales{}};
  return StoredMatrix(std::move(source), static_cast<Type>(plan.packed_type), std::move(ranges), plan.col_begin,
                      plan.col_end);
}

}  // namespace

int ckdist_loader_create(const char* const* paths, int path_count, ckdist_loader** out) {
  return ckdist::guard([&] { *out = new ckdist_loader(std::vector<std::string>(paths, paths + path_count)); });
}

int ckdist_loader_expect_writes(ckdist_loader* loader, int file) {
  return ckdist::guard([&] { loader->loader.expect_writes(file); });
}

void ckdist_loader_free(ckdist_loader* loader) { delete loader; }

int ckdist_loader_add_matrix(ckdist_loader* loader, const ckdist_matrix_plan* plan) {
  return ckdist::guard_value([&] {
    return loader->loader.add_matrix(stored_matrix(loader->loader, *plan), plan->cold != 0, plan->mapped != 0);
  });
}

int ckdist_loader_add_vector(ckdist_loader* loader, const ckdist_vector_plan* plan) {
  return ckdist::guard_value([&] {
    const ckdist::Source source{plan->name,
                                {{&loader->loader.file(plan->file), plan->offset}},
                                static_cast<Type>(plan->source_type),
                                plan->size,
                                1,
                                plan->head_rows,
                                {plan->stored, plan->lane, 1, 1, false, 1, 0, 1},
                                {}};
    return loader->loader.add_vector(
        {source, plan->begin, plan->end, plan->plus_one != 0, plan->exp_sign, plan->factor});
  });
}

int64_t ckdist_loader_arena_bytes(const ckdist_loader* loader) { return loader->loader.arena_bytes(); }
int64_t ckdist_loader_source_bytes(const ckdist_loader* loader) { return loader->loader.source_bytes(); }

int ckdist_loader_open(ckdist_loader* loader, int shared, const char* kept) {
  return ckdist::guard([&] { loader->loader.open(shared != 0, kept); });
}

int64_t ckdist_loader_kept_bytes(const ckdist_loader* loader) { return loader->loader.kept_bytes(); }

const void* ckdist_loader_arena(const ckdist_loader* loader) { return loader->loader.arena(); }

const char* ckdist_loader_path(const ckdist_loader* loader) {
  static thread_local std::string path;
  return (path = loader->loader.path()).c_str();
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

int64_t ckdist_loader_states_offset(const ckdist_loader* loader, int index) {
  return loader->loader.states_offset(index);
}

int ckdist_loader_add_peer(ckdist_loader* loader, const char* path, int64_t arena_bytes) {
  return ckdist::guard_value([&] { return loader->loader.add_peer(path, arena_bytes); });
}

const void* ckdist_loader_peer_arena(const ckdist_loader* loader, int peer) { return loader->loader.peer_arena(peer); }

int ckdist_loader_add_peer_matrix(ckdist_loader* loader, int peer, const ckdist_matrix_plan* plan, int64_t tiles_offset,
                                  int64_t states_offset, const ckdist_matrix** out) {
  return ckdist::guard([&] {
    const Weight& weight =
        loader->loader.add_peer_matrix(peer, stored_matrix(loader->loader, *plan), tiles_offset, states_offset);
    *out = reinterpret_cast<const ckdist_matrix*>(&weight);
  });
}

int ckdist_loader_fill(ckdist_loader* loader, const ckdist_filling* filling) {
  return ckdist::guard(
      [&] { loader->loader.fill({filling->threads, filling->background != 0, filling->until, filling->trace}); });
}

int ckdist_loader_wait(ckdist_loader* loader, int milliseconds) {
  return ckdist::guard_value([&] { return loader->loader.repacker()->wait(milliseconds); });
}

int ckdist_loader_check(ckdist_loader* loader) {
  return ckdist::guard([&] { loader->loader.repacker()->check(); });
}

void ckdist_loader_hold(ckdist_loader* loader, int held) { loader->loader.repacker()->hold(held != 0); }

void ckdist_loader_stop(ckdist_loader* loader) {
  if (Repacker* const repacker = loader->loader.repacker()) repacker->stop();
}

void ckdist_loader_filled(ckdist_loader* loader, ckdist_filled* out) {
  const Repacker& r = *loader->loader.repacker();
  *out = {r.stored_bytes_done(), r.bytes(), r.ready_bytes(), r.kept_bytes(), r.seconds(), r.finished()};
}
