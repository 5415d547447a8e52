// Chooses the blocks of positions that sparse attention reads: for each kv-head, those with the largest scores, where
// the score of a block is that of its best position.
#include "runtime/steps/carved.h"
#include "runtime/steps/select_run.h"

namespace ckdist {
namespace {

struct SelectBlocks : Carved<SelectBlocks, AttentionRun<SelectBlocks, ckdist_select_blocks_step>> {
  AttentionFields attention() const { return {step.layer, step.q, step.out, 0, 0.f, 0.f, nullptr}; }

  static int64_t all_blocks(const Inference& r, const Fields& step) {
    return r.program.context_length / step.block + 1;
  }
  // Buffers of one thread: queries, a key, scores of a piece's positions, and those of a token's blocks.
  struct Room {
    IndexQueries queries;
    float *key, *positions, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int width = r.layers[step.layer].index.key_width;
    const IndexQueries queries = IndexQueries::carve(c, step.groups, width);
    float* const key = c.floats(width);
    float* const positions = c.floats(kIndexPiece * step.groups * kBlockTokens);
    return {queries, key, positions, c.floats(step.groups * all_blocks(r, step))};
  }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return 4 * r.program.max_sequences * step.groups * all_blocks(r, step);
  }

  void run() {
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    r.meet(thread, index);
    if (step.groups > 0 && r.batch.tokens == r.batch.sequences) {
      run_decode();
    } else if (step.groups > 0) {
      r.for_each_item(thread, index, r.batch.tokens, [&](int64_t t) {
        const Token token = token_of(t);
        const int64_t blocks = candidates(token.position);
        if (blocks == 0) return;
        score(t, token, 0, blocks, buffers().scores);
        list(t, token.position, buffers().scores);
      });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  int64_t kept() const { return r.value(step.out).width / step.groups; }
  // Number of blocks before the local ones: some of them are chosen. 0: a token sees all of its blocks.
  int64_t candidates(int64_t position) const {
    const int64_t last = position / step.block;
    return last < kept() ? 0 : last + 1 - step.local;
  }
  void norm_and_rotate(const float* x, int32_t norm, const Rope& rope, int width, float* out) const {
    if (norm >= 0) r.kernels.elementwise.rms_norm(x, r.vector(norm), step.eps, width, out), x = out;
    rotate(x, rope, width, out);
  }

  void store_key(int sequence, int64_t token) {
    const CacheShape& cache = layer().index;
    const int64_t position = r.batch.chunks[sequence].first_position + token - start_of(sequence).token;
    float* const key = buffers().key;
    norm_and_rotate(r.row_of(step.k, token), step.k_norm, rotation(token, position), cache.key_width, key);
    uint8_t* const block =
        layer().blocks + layer().index_offset +
        r.batch.block_tables[start_of(sequence).block + position / kBlockTokens] * layer().block_stride;
    r.kernels.attention.store(cache, block, int(position % kBlockTokens), key, nullptr);
  }

  // One token per sequence.
  void run_decode() {
    const int64_t stride = step.groups * all_blocks(r, step);
    float* const scores = reinterpret_cast<float*>(r.workspace());  // (sequences, stride)
    const auto position_of = [&](int64_t s) { return int64_t{r.batch.chunks[s].first_position}; };
    select_by_sequence(
        *this, [&](int64_t s) { return candidates(position_of(s)); },
        [&](int64_t s, int64_t begin, int64_t end) { score(s, token_of(s), begin, end, scores + s * stride); },
        [&](int64_t s) { list(s, position_of(s), scores + s * stride); });
  }

  // Scores of the blocks [begin, end) for a token: out (groups, all blocks).
  void score(int64_t t, const Token& token, int64_t begin, int64_t end, float* out) {
    const CacheShape& cache = layer().index;
    const int width = cache.key_width;
    const Room own = buffers();
    const float* const x = r.row_of(step.q, t);
    const Rope rope = rotation(t, token.position);
    for (int g = 0; g < step.groups; g++)
      norm_and_rotate(x + g * width, step.q_norm, rope, width, own.queries.q + g * width);
    const IndexTask task = own.queries.task(r.kernels.attention, cache, step.groups, nullptr);
    const int64_t each = step.block / kBlockTokens, stride = all_blocks(r, step);
    const auto take = [&](int64_t block, const float* positions) {
      for (int g = 0; g < step.groups; g++) {
        const float best = *std::max_element(positions + g * kBlockTokens, positions + (g + 1) * kBlockTokens);
        float& score = out[g * stride + block / each];
        score = block % each == 0 ? best : std::max(score, best);
      }
    };
    IndexBlocks(*this, token.sequence)
        .each_piece(begin * each, end * each, [&](int64_t i, const uint8_t* const* blocks, int count) {
          r.kernels.attention.index_scores(task, blocks, count, own.positions);
          for (int b = 0; b < count; b++) take(i + b, own.positions + b * step.groups * kBlockTokens);
        });
  }

  // Writes a token's list: the candidates with the largest scores, then the local blocks.
  void list(int64_t t, int64_t position, const float* scores) {
    const int64_t count = candidates(position), each = kept(), chosen = each - step.local;
    int32_t* out = reinterpret_cast<int32_t*>(const_cast<float*>(r.row_of(step.out, t)));
    for (int g = 0; g < step.groups; g++, out += each) {
      select_largest(scores + g * all_blocks(r, step), count, chosen, out);
      for (int64_t i = 0; i < step.local; i++) out[chosen + i] = int32_t(count + i);
    }
  }
};

const RegisteredKind<SelectBlocks> kKind(ckdist_step_select_blocks);

}  // namespace
}  // namespace ckdist
