// Rows of embedding tables; and per-layer embeddings, each token's row of a table that stays in its file, and a
// projection of the token's embedding.
#include "runtime/steps/packed_weight.h"
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct Embed : InferenceRun<ckdist_embed_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    return step.added < 0 ? 0 : Residual::row_bytes(r, step.out);
  }

  int64_t row_of(int64_t token) const {
    if (step.by == ckdist_embed_by_id) return r.batch.token_ids[token];
    return step.by == ckdist_embed_by_position ? r.token_of(token).position : typed(step.table.first, token);
  }
  // Row in a table of types: the index (0 or 1) of the token's text in its sequence. The table may have only one row.
  int64_t typed(int table, int64_t token) const {
    const Inference::Token at = r.token_of(token);
    const bool second = r.batch.firsts != nullptr && at.position >= r.batch.firsts[at.sequence];
    return std::min<int64_t>(second, r.matrix(table).rows - 1);
  }

  void write_waves(int64_t position, float* row) const {
    const ckdist_rope& rope = r.program.ropes[step.waves];
    const int64_t half = rope.dims / 2;
    std::copy_n(rope.sin + position * half, half, row);
    std::copy_n(rope.cos + position * half, half, row + half);
  }

  // A row of the batch in place of a row of the table. If ranks share the table, the first one has the row.
  void write_embedding(int64_t embedding, float* row, int64_t width) const {
    if (step.first_row == 0) std::copy_n(r.batch.embeddings + embedding * width, width, row);
    else std::fill_n(row, width, 0.f);
  }

  void run() {
    const FloatRows out = r.floats(step.out);  // (tokens, hidden)
    each_row(r.local_tokens, [&](int64_t t) { make_row(r.first_token + t, out.row(t), r.value(step.out).width); });
    r.finish(thread, index, step.out, r.local_tokens);
  }

  void make_row(int64_t token, float* row, int64_t n) const {
    if (step.waves >= 0) return write_waves(r.token_of(token).position, row);
    if (step.by == ckdist_embed_by_place) return void(std::copy_n(r.batch.embeddings + token * n, n, row));
    if (const int32_t id = r.batch.token_ids[token]; step.by == ckdist_embed_by_id && id < 0)
      return write_embedding(-1 - id, row, n);
    int64_t id = row_of(token) - step.first_row;
    int shard = step.table.first;
    for (const int last = shard + step.table.count - 1; shard < last && id >= r.matrix(shard).rows; shard++)
      id -= r.matrix(shard).rows;
    if (id < 0 || id >= r.matrix(shard).rows) return void(std::fill_n(row, n, 0.f));
    unpack_row(r, thread, r.weight(shard), id, row);
    if (step.eps > 0.f)
      scaled(row, 1.f / std::sqrt(r.kernels.elementwise.sum_squares(row, n) / float(n) + step.eps), n, row);
    if (step.scale != 1.f) scaled(row, step.scale, n, row);
    if (step.added < 0) return;
    unpack_row(r, thread, r.weight(step.added), typed(step.added, token), buffer());
    r.kernels.elementwise.add(buffer(), n, row);
  }
};

struct LayerInputs : Carved<LayerInputs, InferenceRun<ckdist_layer_inputs_step>> {
  // Buffers of one thread: the packed row, the row in float32, and a normed part of x.
  struct Room {
    uint8_t* tile;
    float *row, *part;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Matrix& table = r.matrix(step.table);
    return {c.bytes(table.tile_bytes), c.floats(table.cols), c.floats(r.value(step.out.first).width)};
  }

  const Matrix& table() const { return r.matrix(step.table); }
  int64_t row_of(int64_t t) const {
    const int64_t id = r.batch.token_ids[r.first_token + t];
    return id >= 0 && id < table().rows ? id : 0;
  }

  void run() {
    const StoredMatrix& stored = r.weight(step.table).sliced->stored();
    each_row(r.local_tokens, [&](int64_t t) { stored.will_need_row(row_of(t)); });
    each_row(r.local_tokens, [&](int64_t t) { make(stored, t); });
    r.meet(thread, index, true, [&](Idle) { stored.source().file().check(); });
  }

  void make(const StoredMatrix& stored, int64_t t) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const auto [tile, row, part] = buffers();
    stored.pack_row(row_of(t), tile);
    r.kernels.linear[int(table().type)].unpack_row(tile, 0, table().cols, row);
    const int64_t stride = r.value(step.out.first).width;
    const float* const x = r.floats(step.x).row(t);
    for (int l = 0; l < step.out.count; l++) {
      float* const out = r.floats(step.out.first + l).row(t);
      scaled(x + l * stride, step.x_factor, stride, part);
      k.rms_norm(part, r.vector(step.norm), step.eps, stride, part);
      for (int64_t i = 0; i < stride; i++) out[i] = (part[i] + row[l * stride + i] * step.row_factor) * step.factor;
    }
  }
};

const RegisteredKind<Embed> kEmbed(ckdist_step_embed);
const RegisteredKind<LayerInputs> kLayerInputs(ckdist_step_layer_inputs);

}  // namespace
}  // namespace ckdist
