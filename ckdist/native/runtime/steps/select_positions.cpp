// Chooses the positions that sparse attention reads: a lightning indexer scores all positions of a token. Those
// with the largest scores are listed.
#include "runtime/steps/select_run.h"

namespace ckdist {
namespace {

struct SelectPositions : SelectRun<SelectPositions, ckdist_select_positions_step> {
  static int64_t score_floats(const Inference& r, const Fields&) {
    return blocks_of(r.program.context_length) * kBlockTokens;
  }
  // Buffers of one thread: rotated queries, a key, and the scores of a token.
  struct Room {
    IndexQueries queries;
    float *key, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int width = r.layers[step.layer].index.key_width;
    return {IndexQueries::carve(c, step.heads, width), c.floats(width), c.floats(score_floats(r, step))};
  }

  void run() {
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    r.meet(thread, index);
    select();
  }

  int64_t top_k() const { return r.value(step.out).width; }
  int64_t blocks(int64_t position) const { return position < top_k() ? 0 : blocks_of(position + 1); }
  void list(int64_t t, int64_t position, const float* scores) {
    select_largest(scores, position + 1, top_k(), list_of(t));
  }
  void store_key(int sequence, int64_t token) {
    const int64_t position = r.position_of(sequence, token), width = layer().index.key_width;
    float* const key = buffers().key;
    const float* x = r.row_of(step.k, token);
    if (step.norm >= 0) {
      const float* const bias = step.norm_bias >= 0 ? r.vector(step.norm_bias) : nullptr;
      r.kernels.elementwise.layer_norm(x, r.vector(step.norm), bias, step.eps, width, key);
      x = key;
    }
    rotate(x, rotation(token, position), width, key, step.rope_first);
    store_index(sequence, position, key);
  }

  // Scores of the blocks [begin, end) for a token: out[i] is the score of position i.
  void score(int64_t t, const Inference::Token& token, int64_t begin, int64_t end, float* out) {
    const CacheShape& cache = layer().index;
    const IndexQueries queries = buffers().queries;
    const float* const x = r.row_of(step.q, t);
    const Rope rope = rotation(t, token.position);
    for (int64_t h = 0; h < step.heads; h++)
      rotate(x + h * cache.key_width, rope, cache.key_width, queries.q + h * cache.key_width, step.rope_first);
    const IndexTask task = queries.task(r.kernels.attention, cache, step.heads, r.row_of(step.weights, t));
    IndexBlocks(*this, token.sequence).each_piece(begin, end, [&](int64_t i, const uint8_t* const* blocks, int count) {
      r.kernels.attention.index_scores(task, blocks, count, out + i * kBlockTokens);
    });
  }
};

const RegisteredKind<SelectPositions> kSelectPositions(ckdist_step_select_positions);

}  // namespace
}  // namespace ckdist
