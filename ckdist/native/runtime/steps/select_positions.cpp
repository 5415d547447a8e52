// Chooses the positions that sparse attention reads: a lightning indexer scores all positions of a token. Those
// with the largest scores are listed.
#include "runtime/steps/attention_run.h"
#include "runtime/steps/carved.h"
#include "runtime/steps/select_largest.h"

namespace ckdist {
namespace {

struct SelectPositions : Carved<SelectPositions, AttentionRun<SelectPositions, ckdist_select_positions_step>> {
  AttentionFields attention() const { return {step.layer, step.q, step.out, 0, 0.f, 0.f, nullptr}; }

  static int64_t padded_context(const Inference& r) { return blocks_of(r.program.context_length) * kBlockTokens; }
  // Buffers of one thread: rotated queries, a key, and the scores of a token.
  struct Room {
    float *q, *key, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int width = r.layers[step.layer].index.key_width;
    float* const q = c.floats(int64_t{step.heads} * width);
    float* const key = c.floats(width);
    return {q, key, c.floats(padded_context(r))};
  }
  static int64_t workspace_bytes(const Inference& r, const Fields&) {
    return 4 * r.program.max_sequences * padded_context(r);
  }
  Room own() const {
    Carver c{r.memory(thread)};
    return room(c, r, step);
  }

  void run() {
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    r.meet(thread, index);
    if (r.batch.tokens == r.batch.sequences) {
      select_by_sequence();
    } else {
      r.for_each_item(thread, index, r.batch.tokens, [&](int64_t t) {
        const Token token = token_of(t);
        if (token.position < top_k()) return;
        const int64_t blocks = blocks_of(token.position + 1);
        score(t, token, 0, blocks, own().scores);
        select_largest(own().scores, token.position + 1, top_k(), list_of(t));
      });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  int64_t top_k() const { return r.value(step.out).width; }
  int32_t* list_of(int64_t token) {
    int64_t stride;
    return reinterpret_cast<int32_t*>(r.floats(step.out, &stride) + token * top_k());
  }
  uint8_t* index_block(int sequence, int64_t block) const {
    const Inference::Layer& of = layer();
    return of.blocks + of.index_offset + r.batch.block_tables[start_of(sequence).block + block] * of.block_stride;
  }

  void store_key(int sequence, int64_t token) {
    const CacheShape& cache = layer().index;
    const int64_t position = r.batch.chunks[sequence].first_position + token - start_of(sequence).token;
    float* const key = own().key;
    const float* x = r.row_of(step.k, token);
    if (step.norm >= 0) {
      const float* const bias = step.norm_bias >= 0 ? r.vector(step.norm_bias) : nullptr;
      r.kernels.elementwise.layer_norm(x, r.vector(step.norm), bias, step.eps, cache.key_width, key);
      x = key;
    }
    rotate(x, rotation(token, position), cache.key_width, key, step.rope_first);
    r.kernels.attention.store(cache, index_block(sequence, position / kBlockTokens), int(position % kBlockTokens), key,
                              nullptr);
  }

  // One token per sequence: threads divide the blocks of all sequences, then the sequences.
  void select_by_sequence() {
    const int64_t stride = padded_context(r);
    float* const scores = reinterpret_cast<float*>(r.workspace());  // (sequences, stride)
    const auto blocks_to_score = [&](int64_t s) {
      const int64_t position = r.batch.chunks[s].first_position;
      return position < top_k() ? 0 : blocks_of(position + 1);
    };
    int64_t all = 0, before = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) all += blocks_to_score(s);
    if (all == 0) return;
    const Range part = {all * thread / r.active(), all * (thread + 1) / r.active()};
    for (int64_t s = 0; s < r.batch.sequences; s++) {
      const int64_t blocks = blocks_to_score(s);
      const int64_t begin = std::max<int64_t>(part.begin - before, 0), end = std::min(part.end - before, blocks);
      if (begin < end) score(s, token_of(s), begin, end, scores + s * stride);
      before += blocks;
    }
    r.meet(thread, index);
    for (int64_t s = thread; s < r.batch.sequences; s += r.active())
      if (blocks_to_score(s) > 0)
        select_largest(scores + s * stride, int64_t{r.batch.chunks[s].first_position} + 1, top_k(), list_of(s));
  }

  // Scores of the blocks [begin, end) for a token: out[i] is the score of position i.
  void score(int64_t t, const Token& token, int64_t begin, int64_t end, float* out) {
    const CacheShape& cache = layer().index;
    const float* const x = r.row_of(step.q, t);
    float* const q = own().q;
    const Rope rope = rotation(t, token.position);
    for (int64_t h = 0; h < step.heads; h++)
      rotate(x + h * cache.key_width, rope, cache.key_width, q + h * cache.key_width, step.rope_first);
    const IndexTask task = {cache.key_type, cache.key_width, step.heads, q, r.row_of(step.weights, t)};
    for (int64_t block = begin; block < end; block++)
      r.kernels.attention.index_scores(task, index_block(token.sequence, block), out + block * kBlockTokens);
  }
};

const RegisteredKind<SelectPositions> kKind(ckdist_step_select_positions);

}  // namespace
}  // namespace ckdist
