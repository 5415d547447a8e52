// Chooses the positions that sparse attention reads: a lightning indexer scores all positions of a token. Those
// with the largest scores are listed.
#include "runtime/steps/carved.h"
#include "runtime/steps/select_run.h"

namespace ckdist {
namespace {

struct SelectPositions : Carved<SelectPositions, AttentionRun<SelectPositions, ckdist_select_positions_step>> {
  AttentionFields attention() const { return {step.layer, step.q, step.out, 0, 0.f, 0.f, nullptr}; }

  static int64_t padded_context(const Inference& r) { return blocks_of(r.program.context_length) * kBlockTokens; }
  // Buffers of one thread: rotated queries, a key, and the scores of a token.
  struct Room {
    IndexQueries queries;
    float *key, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int width = r.layers[step.layer].index.key_width;
    const IndexQueries queries = IndexQueries::carve(c, step.heads, width);
    float* const key = c.floats(width);
    return {queries, key, c.floats(padded_context(r))};
  }
  static int64_t workspace_bytes(const Inference& r, const Fields&) {
    return 4 * r.program.max_sequences * padded_context(r);
  }

  void run() {
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    r.meet(thread, index);
    if (r.batch.tokens == r.batch.sequences) {
      run_decode();
    } else {
      r.for_each_item(thread, index, r.batch.tokens, [&](int64_t t) {
        const Token token = token_of(t);
        if (token.position < top_k()) return;
        const int64_t blocks = blocks_of(token.position + 1);
        score(t, token, 0, blocks, buffers().scores);
        select_largest(buffers().scores, token.position + 1, top_k(), list_of(t));
      });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  int64_t top_k() const { return r.value(step.out).width; }
  int32_t* list_of(int64_t token) {
    int64_t stride;
    return reinterpret_cast<int32_t*>(r.floats(step.out, &stride) + token * top_k());
  }
  void store_key(int sequence, int64_t token) {
    const CacheShape& cache = layer().index;
    const int64_t position = r.batch.chunks[sequence].first_position + token - start_of(sequence).token;
    float* const key = buffers().key;
    const float* x = r.row_of(step.k, token);
    if (step.norm >= 0) {
      const float* const bias = step.norm_bias >= 0 ? r.vector(step.norm_bias) : nullptr;
      r.kernels.elementwise.layer_norm(x, r.vector(step.norm), bias, step.eps, cache.key_width, key);
      x = key;
    }
    rotate(x, rotation(token, position), cache.key_width, key, step.rope_first);
    uint8_t* const block =
        layer().blocks + layer().index_offset +
        r.batch.block_tables[start_of(sequence).block + position / kBlockTokens] * layer().block_stride;
    r.kernels.attention.store(cache, block, int(position % kBlockTokens), key, nullptr);
  }

  // One token per sequence.
  void run_decode() {
    const int64_t stride = padded_context(r);
    float* const scores = reinterpret_cast<float*>(r.workspace());  // (sequences, stride)
    const auto position_of = [&](int64_t s) { return int64_t{r.batch.chunks[s].first_position}; };
    select_by_sequence(
        *this, [&](int64_t s) { return position_of(s) < top_k() ? 0 : blocks_of(position_of(s) + 1); },
        [&](int64_t s, int64_t begin, int64_t end) { score(s, token_of(s), begin, end, scores + s * stride); },
        [&](int64_t s) { select_largest(scores + s * stride, position_of(s) + 1, top_k(), list_of(s)); });
  }

  // Scores of the blocks [begin, end) for a token: out[i] is the score of position i.
  void score(int64_t t, const Token& token, int64_t begin, int64_t end, float* out) {
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

const RegisteredKind<SelectPositions> kKind(ckdist_step_select_positions);

}  // namespace
}  // namespace ckdist
