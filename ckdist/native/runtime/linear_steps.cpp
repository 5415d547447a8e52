#include <algorithm>

#include "runtime/executable.h"
#include "runtime/shares.h"

// Steps of an executable: embedding, activations and the matrices that read them.

namespace ckdist {

namespace {
// x * factor in `row`, which may be x.
const float* scaled(const float* x, float factor, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i++) row[i] = x[i] * factor;
  return row;
}
}  // namespace

// out[0]: (tokens, hidden), zeros for ids of another rank's part of the vocabulary
void Executable::embed(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  int64_t stride;
  float* out = floats(step.out[0], &stride);
  const Range own = rows_of(thread, own_tokens_);
  for (int64_t t = own.begin; t < own.end; t++) {
    float* row = out + t * stride;
    int64_t id = batch_.token_ids[own_ + t] - step.i[0];
    int shard = step.matrix[0];
    for (const int last = shard + step.count[0] - 1; shard < last && id >= matrix(shard).rows; shard++)
      id -= matrix(shard).rows;
    const Matrix& table = matrix(shard);
    if (id < 0 || id >= table.rows) {
      std::fill(row, row + stride, 0.f);
      continue;
    }
    const SlicedMatrix* const sliced = weight(shard).sliced;
    if (sliced && !sliced->whole() && !sliced->ready(sliced->slice_of(id / kTileRows))) {
      sliced->stored().pack_row(id, workers_[thread].tiles);
      kernels_.linear[int(table.type)].unpack_row(workers_[thread].tiles, 0, table.cols, row);
    } else {
      kernels_.linear[int(table.type)].unpack_row(table.tiles + id / kTileRows * table.tile_bytes, int(id % kTileRows),
                                                  table.cols, row);
    }
    if (step.f[0] != 1.f)
      for (int64_t c = 0; c < stride; c++) row[c] *= step.f[0];
  }
  finish(thread, index, own_tokens_);
}

void Executable::prepare(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int64_t n = rows(step);
  if (replicated(step)) {
    // Every thread prepares every row for itself; one of them also keeps the residual for later steps.
    for (int64_t r = 0; r < n; r++)
      prepare_row(thread, step, r, step.outputs_only ? token_row(step, r) : r, r % active_ == thread);
    return;
  }
  const Range own = rows_of(thread, n);
  for (int64_t r = own.begin; r < own.end; r++)
    prepare_row(thread, step, r, step.outputs_only ? token_row(step, r) : r, true);
  meet(thread, index);
}

// Rows are numbered as batch_.output_tokens, so that all ranks find a row without asking whose it is.
void Executable::share_outputs(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  int64_t stride;
  float* out = floats(step.out[0], &stride);
  for (int64_t o = thread; o < batch_.outputs; o += active_) {
    const int64_t row = batch_.output_tokens[o] - own_;
    if (row < 0 || row >= own_tokens_) continue;
    const float* s = residual_row(thread, step, o - own_output_, row);
    std::copy(s, s + stride, out + o * stride);
  }
  finish(thread, index, batch_.outputs);
}

// x + norm(sum of y): of each row `in_row`, or `out_row` where its rows are taken, or what the rank of the output
// `out_row` has shared.
const float* Executable::residual_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row) {
  const ElementwiseKernel& k = kernels_.elementwise;
  Worker& worker = workers_[thread];
  const ckdist_value& y = value(step.y);
  const int64_t n = y.width;
  const float* parts[kMaxRanks];
  int count = 1;
  int64_t stride;
  if (y.kind == ckdist_in_slot || y.kind == ckdist_in_sums) {
    count = ranks_->summands(int(y.place), parts);
    for (int p = 0; p < count; p++)
      parts[p] += (y.kind == ckdist_in_sums ? (y.taken ? own_output_ + out_row : own_ + in_row)
                   : y.taken                ? out_row
                                            : in_row) *
                  n;
    worker.moved += (count - 1) * n * 4;
  } else if (y.kind == ckdist_in_outputs) {
    const int rank = owner(batch_.output_tokens[out_row]);
    parts[0] = peers_[y.place][rank] + out_row * n;
    worker.moved += rank == ranks_->local_rank ? 0 : n * 4;
  } else {
    parts[0] = floats(step.y, &stride) + (y.taken ? out_row : in_row) * n;
  }

  const float* s = parts[0];
  if (count > 1) k.sum_parts(nullptr, parts, count, n, worker.row), s = worker.row;
  if (step.vector[0] >= 0) k.rms_norm(s, vector(step.vector[0]), step.f[0], n, worker.row), s = worker.row;
  if (step.f[1] != 0.f && step.f[1] != 1.f) s = scaled(s, step.f[1], n, worker.row);
  if (step.x >= 0) {
    const float* x = floats(step.x, &stride) + (value(step.x).taken ? out_row : in_row) * n;
    const float* two[] = {x, s};
    k.sum_parts(nullptr, two, 2, n, worker.row), s = worker.row;
  }
  return s;
}

void Executable::prepare_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row, bool store) {
  const ElementwiseKernel& k = kernels_.elementwise;
  Worker& worker = workers_[thread];
  const ckdist_value& y = value(step.y);
  const float* s = nullptr;
  int64_t stride;
  if (y.kind != ckdist_in_columns) {
    s = residual_row(thread, step, out_row, in_row);
    if (step.out[0] >= 0 && store) std::copy(s, s + y.width, floats(step.out[0], &stride) + out_row * y.width);
    if (step.vector[1] >= 0) k.rms_norm(s, vector(step.vector[1]), step.f[0], y.width, worker.row), s = worker.row;
    if (step.f[2] != 0.f && step.f[2] != 1.f) s = scaled(s, step.f[2], y.width, worker.row);
  }
  for (int f = 0; f < 3; f++) {
    if (step.out[1 + f] < 0) continue;
    const float* part = s;
    for (int c = 0; c < step.count[0]; c++) {
      const ckdist_value& a = value(step.out[1 + f] + c);
      if (y.kind == ckdist_in_columns) {
        part = peers_[y.place][c] + (own_ + in_row) * a.floats;
        worker.moved += c == ranks_->local_rank ? 0 : a.floats * 4;
      }
      uint8_t* base = replicated(step) ? worker.activations[f] : arena_->data() + a.place;
      if (a.width > 0)
        k.prepare(ActivationFormat(f), part, a.floats, a.lead, a.width, base + out_row * activation_stride(a));
      part += a.floats;
    }
  }
}

int64_t Executable::weight_bytes(const ckdist_step& step) const {
  int64_t bytes = 0;
  for (int m = 0; m < 4 && step.matrix[m] >= 0; m++)
    for (int s = step.matrix[m]; s < step.matrix[m] + step.count[m]; s++)
      bytes += matrix(s).tile_count() * matrix(s).tile_bytes;
  return bytes;
}

// Calls visit(m, s, column, first tile, end) for the tiles of shards whose middle lies in bytes [from, to) of a step's
// matrices laid end to end; those of a gated step lie tile beside tile, and so do shards that are added. `column`: the
// rows of the shards before.
template <class Visit>
void Executable::each_range(const ckdist_step& step, int64_t from, int64_t to, Visit&& visit) {
  const bool gated = step.i[0], added = step.i[2];
  int64_t offset = 0;
  for (int m = 0; m < (gated ? 1 : 4) && step.matrix[m] >= 0; m++) {
    int64_t column = 0;
    for (int s = 0; s < (added ? 1 : step.count[m]); s++) {
      const Matrix& w = matrix(step.matrix[m] + s);
      int64_t tile_bytes = gated ? w.tile_bytes + matrix(step.matrix[1] + s).tile_bytes : w.tile_bytes;
      for (int more = 1; added && more < step.count[m]; more++) tile_bytes += matrix(step.matrix[m] + more).tile_bytes;
      auto boundary = [&](int64_t at) {
        return tile_bytes ? std::clamp<int64_t>((at - offset + tile_bytes / 2) / tile_bytes, 0, w.tile_count()) : 0;
      };
      if (boundary(from) < boundary(to)) visit(m, s, column, boundary(from), boundary(to));
      offset += tile_bytes * w.tile_count();
      column += w.rows;
    }
  }
}

// While a thread waits in a step of few tokens, memory would idle: it brings the start of its first piece of the next
// product to the L2 cache, as far as it gets.
void Executable::find_ahead(int thread, int index) {
  Ahead& ahead = workers_[thread].ahead;
  const int next = next_linear_[phase_ - phases_.data()][index];
  if (ahead.step == next) return;
  ahead = {next, nullptr, nullptr};
  if (next < 0 || rows(phase_->steps[next]) > kFewRows) return;
  const ckdist_step& step = phase_->steps[next];
  const int64_t bytes = weight_bytes(step);
  if (bytes == 0) return;  // nothing of these matrices is this rank's
  const Shares shares(bytes, active_, true);
  each_range(step, shares.begin(thread), shares.begin(thread + 1),
             [&](int m, int s, int64_t, int64_t begin, int64_t end) {
               if (ahead.at != nullptr) return;
               const Weight& weight = this->weight(step.matrix[m] + s);
               const Matrix& w = weight.matrix;
               if (weight.sliced && !weight.sliced->whole()) {
                 const int64_t slice = weight.sliced->slice_of(begin);
                 end = weight.sliced->ready(slice) ? std::min(end, weight.sliced->begin(slice + 1)) : begin;
               }
               ahead.at = w.tiles + begin * w.tile_bytes;
               ahead.end = ahead.at + std::min((end - begin) * w.tile_bytes, kAheadBytes);
             });
}

void Executable::fetch_ahead(void* with) {
  Ahead& ahead = *static_cast<Ahead*>(with);
  for (int line = 0; line < 4 && ahead.at < ahead.end; line++, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
  cpu_pause();
}

void Executable::linear(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int64_t n = rows(step), bytes = weight_bytes(step);
  if (n > 0 && bytes > 0) {
    const auto multiply_range = [&](int64_t from, int64_t to, Range some) {
      each_range(step, from, to, [&](int m, int s, int64_t column, int64_t begin, int64_t end) {
        if (step.i[2]) multiply_added(thread, step, {begin, end}, some);
        else if (step.i[0]) multiply_gated(thread, step, s, column, {begin, end}, some);
        else multiply(thread, step, m, s, column, {begin, end}, some);
      });
    };
    if (n >= kOwnRows * active_ && !reorganizing_) {  // else every thread would pack all weights
      const int64_t pieces = std::max((bytes + kPieceBytes - 1) / kPieceBytes, kLeastPieces);
      share_out(thread, index, pieces * active_, [&](int64_t item) {
        multiply_range(bytes * (item % pieces) / pieces, bytes * (item % pieces + 1) / pieces,
                       rows_of(int(item / pieces), n));
      });
    } else {
      const Shares shares(bytes, active_, n <= kFewRows);
      for (int64_t piece = thread; piece < shares.pieces(); piece = active_ + counters_[index].fetch_add(1))
        multiply_range(shares.begin(piece), shares.begin(piece + 1), {0, n});
    }
  }
  const bool more = step.i[3], partial = value(step.out[0]).kind == ckdist_in_sums ||
                                         (value(step.out[0]).kind == ckdist_in_slot && !phase_->tokens_cut);
  if (bytes == 0 && (partial || more))  // this rank has no columns of the matrices: its part of the sum is zero
    for (int m = 0; m < 4 && step.out[m] >= 0; m++) {
      int64_t stride;
      float* y = floats(step.out[m], &stride);
      for (int64_t t = thread; t < n; t += active_) std::fill(y + t * stride, y + (t + 1) * stride, 0.f);
    }
  if (more) meet(thread, index);  // the low_rank step that follows finishes
  else finish(thread, index, n);
}

const uint8_t* Executable::activations(int thread, const ckdist_step& step, int index) const {
  const ckdist_value& a = value(index);
  return replicated(step) ? workers_[thread].activations[a.format] : arena_->data() + a.place;
}

// Calls product(part, first) for parts of tiles [begin, end) that follow one another, each a matrix of packed tiles of
// which the first is tile `first` of the weight: the arena's where they are ready, else packed here, a slice at a time,
// for this product alone or to stay.
template <class Product>
void Executable::each_packed(int thread, const Weight& weight, int64_t begin, int64_t end, Product&& product) {
  const auto part = [&](const uint8_t* tiles, int64_t from, int64_t to) {
    const Matrix& w = weight.matrix;
    product(Matrix{w.type, std::min((to - from) * kTileRows, w.rows - from * kTileRows), w.cols, w.tile_bytes, tiles},
            from);
  };
  const SlicedMatrix* const sliced = weight.sliced;
  const int64_t tile_bytes = weight.matrix.tile_bytes;
  if (!sliced || sliced->whole()) return part(weight.matrix.tiles + begin * tile_bytes, begin, end);
  Worker& worker = workers_[thread];
  for (int64_t tile = begin, next; tile < end; tile = next) {
    int64_t slice = sliced->slice_of(tile);
    next = std::min(end, sliced->begin(slice + 1));
    if (sliced->ready(slice)) {
      while (next < end && sliced->ready(++slice)) next = std::min(end, sliced->begin(slice + 1));
      part(weight.matrix.tiles + tile * tile_bytes, tile, next);
    } else if (reorganizer_->claim(*sliced, slice)) {
      sliced->stored().pack(sliced->begin(slice), sliced->begin(slice + 1), worker.tiles);
      part(worker.tiles + (tile - sliced->begin(slice)) * tile_bytes, tile, next);
      reorganizer_->keep(*sliced, slice, worker.tiles, *worker.mover);
    } else {
      sliced->stored().pack(tile, next, worker.tiles);
      part(worker.tiles, tile, next);
    }
  }
}

// Tiles of shard s of matrix m, whose first row is column `column` of the result.
void Executable::multiply(int thread, const ckdist_step& step, int m, int s, int64_t column, Range tiles, Range rows) {
  const Weight& weight = this->weight(step.matrix[m] + s);
  const Matrix& w = weight.matrix;
  int64_t stride;
  float* y = floats(step.out[m], &stride) + column;
  const int64_t x_stride = activation_stride(value(step.in[m]));
  const uint8_t* const x = activations(thread, step, step.in[m]) + rows.begin * x_stride;
  each_packed(thread, weight, tiles.begin, tiles.end, [&](const Matrix& part, int64_t first) {
    kernels_.linear[int(w.type)].multiply(part, 0, part.tile_count(), x, x_stride, rows.end - rows.begin,
                                          y + rows.begin * stride + first * kTileRows, stride);
  });
  const int64_t from = tiles.begin * kTileRows, to = std::min(tiles.end * kTileRows, w.rows);
  if (step.vector[m] >= 0)
    for (int64_t t = rows.begin; t < rows.end; t++)
      kernels_.elementwise.add(vector(step.vector[m] + s) + from, to - from, y + t * stride + from);
  if (step.f[1] != 0.f)
    for (int64_t t = rows.begin; t < rows.end; t++)
      kernels_.elementwise.soft_cap(y + t * stride + from, step.f[1], to - from);
}

// Tiles of gate and up, and what joins them. Of many rows a few with a few tiles at a time; few read long stretches of
// weights, and weights that are not packed are packed once for all rows.
void Executable::multiply_gated(int thread, const ckdist_step& step, int s, int64_t column, Range tiles, Range rows) {
  const Matrix& w = matrix(step.matrix[0] + s);
  const bool cut = rows.end - rows.begin > kFewRows && !reorganizing_;
  const int64_t tiles_each =
      cut ? std::max<int64_t>(kPieceBytes / (w.tile_bytes + matrix(step.matrix[1] + s).tile_bytes), 1)
          : tiles.end - tiles.begin;
  const int64_t rows_each = cut ? kGatedRows : rows.end - rows.begin;
  int64_t gate_stride, up_stride;
  float* const gate = floats(step.out[0], &gate_stride) + column;
  const float* const up = floats(step.out[1], &up_stride) + column;
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_each) {
    const Range some_tiles = {tile, std::min(tile + tiles_each, tiles.end)};
    const int64_t from = some_tiles.begin * kTileRows, to = std::min(some_tiles.end * kTileRows, w.rows);
    for (int64_t row = rows.begin; row < rows.end; row += rows_each) {
      const Range some_rows = {row, std::min(row + rows_each, rows.end)};
      for (int m = 0; m < 2; m++) multiply(thread, step, m, s, column, some_tiles, some_rows);
      for (int64_t t = some_rows.begin; t < some_rows.end; t++)
        kernels_.elementwise.gated(GateFunction(step.i[1]), gate + t * gate_stride + from, up + t * up_stride + from,
                                   to - from, gate + t * gate_stride + from);
    }
  }
}

// Tiles of a matrix whose columns are cut into shards: the shards' products, in the order in which a sum over ranks has
// them.
void Executable::multiply_added(int thread, const ckdist_step& step, Range tiles, Range rows) {
  float* const product = workers_[thread].product;
  int64_t stride;
  float* const out = floats(step.out[0], &stride);
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += kAddedTiles) {
    const int64_t last = std::min(tile + kAddedTiles, tiles.end), from = tile * kTileRows;
    const int64_t width = std::min(last * kTileRows, matrix(step.matrix[0]).rows) - from;
    for (int64_t token = rows.begin; token < rows.end; token += kAddedTokens) {
      const int64_t tokens = std::min<int64_t>(kAddedTokens, rows.end - token);
      bool first = true;
      for (int s = 0; s < step.count[0]; s++) {
        const Weight& w = weight(step.matrix[0] + s);
        if (w.matrix.cols == 0) continue;
        const int64_t row = activation_stride(value(step.in[0] + s));
        float* const y = first ? out + token * stride + from : product;
        const int64_t y_stride = first ? stride : width;
        const uint8_t* const x = activations(thread, step, step.in[0] + s) + token * row;
        each_packed(thread, w, tile, last, [&](const Matrix& part, int64_t first) {
          kernels_.linear[int(part.type)].multiply(part, 0, part.tile_count(), x, row, tokens,
                                                   y + first * kTileRows - from, y_stride);
        });
        for (int64_t t = 0; t < tokens; t++) {
          if (!first) kernels_.elementwise.add(product + t * width, width, out + (token + t) * stride + from);
          else if (step.vector[0] >= 0)
            kernels_.elementwise.add(vector(step.vector[0]) + from, width, out + (token + t) * stride + from);
        }
        first = false;
      }
    }
  }
}

}  // namespace ckdist
