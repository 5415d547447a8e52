// Rows of the embedding table.
#include "runtime/steps/packed_weight.h"

namespace ckdist {
namespace {

struct Embed : StepRun<Inference, ckdist_embed_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    return step.added < 0 ? 0 : r.value(step.out).width * int64_t{sizeof(float)};
  }

  // A token's position in its sequence, and the index (0 or 1) of its text in the sequence.
  struct Place {
    int64_t position, type;
  };
  Place place_of(int64_t token) const {
    int64_t sequence = 0;
    for (; token >= r.batch.chunks[sequence].tokens; sequence++) token -= r.batch.chunks[sequence].tokens;
    const int64_t position = r.batch.chunks[sequence].first_position + token;
    return {position, r.batch.firsts != nullptr && position >= r.batch.firsts[sequence]};
  }
  int64_t row_of(int64_t token) const {
    if (step.by == ckdist_embed_by_id) return r.batch.token_ids[token];
    const Place place = place_of(token);
    return step.by == ckdist_embed_by_position ? place.position : typed(step.table.first, place);
  }
  // Row in a table of types. The table may have only one row.
  int64_t typed(int table, const Place& place) const { return std::min(place.type, r.matrix(table).rows - 1); }

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
    int64_t stride;
    float* const out = r.floats(step.out, &stride);  // (tokens, hidden)
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      float* const row = out + t * stride;
      const int64_t token = r.first_token + t;
      if (step.waves >= 0) {
        write_waves(place_of(token).position, row);
        continue;
      }
      if (step.by == ckdist_embed_by_place) {
        std::copy_n(r.batch.embeddings + token * stride, stride, row);
        continue;
      }
      if (const int32_t id = r.batch.token_ids[token]; step.by == ckdist_embed_by_id && id < 0) {
        write_embedding(-1 - id, row, stride);
        continue;
      }
      int64_t id = row_of(token) - step.first_row;
      int shard = step.table.first;
      for (const int last = shard + step.table.count - 1; shard < last && id >= r.matrix(shard).rows; shard++)
        id -= r.matrix(shard).rows;
      if (id < 0 || id >= r.matrix(shard).rows) {
        std::fill(row, row + stride, 0.f);
        continue;
      }
      unpack_row(r, thread, r.weight(shard), id, row);
      if (step.eps > 0.f) {
        const float mean = r.kernels.elementwise.sum_squares(row, stride) / static_cast<float>(stride);
        const float factor = 1.f / std::sqrt(mean + step.eps);
        for (int64_t c = 0; c < stride; c++) row[c] *= factor;
      }
      if (step.scale != 1.f)
        for (int64_t c = 0; c < stride; c++) row[c] *= step.scale;
      if (step.added >= 0) {
        float* const added = reinterpret_cast<float*>(r.memory(thread));
        unpack_row(r, thread, r.weight(step.added), typed(step.added, place_of(token)), added);
        r.kernels.elementwise.add(added, stride, row);
      }
    }
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

const RegisteredKind<Embed> kKind(ckdist_step_embed);

}  // namespace
}  // namespace ckdist
