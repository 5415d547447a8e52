// Rows of the embedding table.
#include "runtime/steps/packed_weight.h"

namespace ckdist {
namespace {

struct Embed : StepRun<Inference, ckdist_embed_step> {
  void run() {
    int64_t stride;
    float* const out = r.floats(step.out, &stride);  // (tokens, hidden)
    const Range own = r.rows_of(thread, r.local_tokens);
    for (int64_t t = own.begin; t < own.end; t++) {
      float* const row = out + t * stride;
      int64_t id = r.batch.token_ids[r.first_token + t] - step.first_row;
      int shard = step.table.first;
      for (const int last = shard + step.table.count - 1; shard < last && id >= r.matrix(shard).rows; shard++)
        id -= r.matrix(shard).rows;
      if (id < 0 || id >= r.matrix(shard).rows) {
        std::fill(row, row + stride, 0.f);
        continue;
      }
      unpack_row(r, thread, r.weight(shard), id, row);
      if (step.scale != 1.f)
        for (int64_t c = 0; c < stride; c++) row[c] *= step.scale;
    }
    r.finish(thread, index, step.out, r.local_tokens);
  }
};

const RegisteredKind<Embed> kKind(ckdist_step_embed);

}  // namespace
}  // namespace ckdist
