// Chooses the blocks of positions that sparse attention reads: for each kv-head, those with the largest scores, where
// the score of a block is that of its best position.
#include "runtime/steps/select_run.h"

namespace ckdist {
namespace {

struct SelectBlocks : SelectRun<SelectBlocks, ckdist_select_blocks_step> {
  static int64_t all_blocks(const Inference& r, const Fields& step) {
    return r.program.context_length / step.block + 1;
  }
  static int64_t score_floats(const Inference& r, const Fields& step) { return step.groups * all_blocks(r, step); }
  // Buffers of one thread: queries, a key, scores of a piece's positions, and those of a token's blocks.
  struct Room {
    IndexQueries queries;
    float *key, *positions, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const int width = r.layers[step.layer].index.key_width;
    return {IndexQueries::carve(c, step.groups, width), c.floats(width),
            c.floats(kIndexPiece * step.groups * kBlockTokens), c.floats(score_floats(r, step))};
  }

  void run() {
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    r.meet(thread, index);
    select();
  }

  int64_t kept() const { return r.value(step.out).width / step.groups; }
  // Number of blocks before the local ones: some of them are chosen. 0: a token sees all of its blocks.
  int64_t blocks(int64_t position) const {
    if (step.groups == 0) return 0;
    const int64_t last = position / step.block;
    return last < kept() ? 0 : last + 1 - step.local;
  }
  void norm_and_rotate(const float* x, int32_t norm, const Rope& rope, int width, float* out) const {
    if (norm >= 0) r.kernels.elementwise.rms_norm(x, r.vector(norm), step.eps, width, out), x = out;
    rotate(x, rope, width, out);
  }

  void store_key(int sequence, int64_t token) {
    const int64_t position = r.position_of(sequence, token);
    float* const key = buffers().key;
    norm_and_rotate(r.row_of(step.k, token), step.k_norm, rotation(token, position), layer().index.key_width, key);
    store_index(sequence, position, key);
  }

  // Scores of the blocks [begin, end) for a token: out (groups, all blocks).
  void score(int64_t t, const Inference::Token& token, int64_t begin, int64_t end, float* out) {
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
    const int64_t count = blocks(position), each = kept(), chosen = each - step.local;
    int32_t* out = list_of(t);
    for (int g = 0; g < step.groups; g++, out += each) {
      select_largest(scores + g * all_blocks(r, step), count, chosen, out);
      for (int64_t i = 0; i < step.local; i++) out[chosen + i] = int32_t(count + i);
    }
  }
};

const RegisteredKind<SelectBlocks> kSelectBlocks(ckdist_step_select_blocks);

}  // namespace
}  // namespace ckdist
