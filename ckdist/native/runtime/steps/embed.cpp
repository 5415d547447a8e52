// Rows of the embedding table.
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
    each_row(r.local_tokens, [&](int64_t t) { make_row(r.first_token + t, out.row(t), out.stride); });
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

const RegisteredKind<Embed> kKind(ckdist_step_embed);

}  // namespace
}  // namespace ckdist
