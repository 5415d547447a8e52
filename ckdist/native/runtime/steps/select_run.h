// Parts of the steps that choose positions for sparse attention.
#pragma once
#include "runtime/steps/layer_run.h"

namespace ckdist {

// The order of floats as whole numbers. NaN has a place in it, so that it leads to a list like any other.
inline uint32_t ordered(float x) {
  uint32_t bits;
  x += 0.f;  // -0 becomes +0
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// out = the k positions of n with the largest scores, ascending; of equal scores the lower position. k < n. The k-th
// largest number is found digit by digit.
inline void select_largest(const float* scores, int64_t n, int64_t k, int32_t* out) {
  constexpr int kBits[] = {11, 11, 10};
  uint32_t prefix = 0;
  int shift = 32;
  int64_t left = k;  // of the numbers that begin with `prefix`
  for (const int bits : kBits) {
    int64_t counts[1 << 11] = {};
    const int before = shift;
    shift -= bits;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t number = ordered(scores[i]);
      if (before == 32 || number >> before == prefix) counts[number >> shift & ((1u << bits) - 1)]++;
    }
    int64_t digit = (int64_t{1} << bits) - 1;
    for (; counts[digit] < left; digit--) left -= counts[digit];
    prefix = prefix << bits | uint32_t(digit);
  }
  for (int64_t i = 0; i < n; i++) {
    const uint32_t number = ordered(scores[i]);
    if (number > prefix || (number == prefix && left-- > 0)) *out++ = int32_t(i);
  }
}

constexpr int64_t kIndexPiece = 2;  // blocks that are scored together

// Queries of an index, as kernels read them. Carved from a thread's memory.
struct IndexQueries {
  float *q, *scales;
  int16_t* codes;

  static IndexQueries carve(Carver& c, int64_t heads, int64_t width) {
    return {c.floats(heads * width), c.floats(heads), c.array<int16_t>(heads * width)};
  }
  // A task for the queries in `q`.
  IndexTask task(const AttentionKernel& kernel, const CacheShape& index, int heads, const float* weights) const {
    if (index.key_type == KvType::i16) kernel.index_codes(q, index.key_width, heads, codes, scales);
    return {index.key_type, index.key_width, heads, q, weights, codes, scales};
  }
};

// The index in a sequence's blocks of the cache. Blocks are far apart, so hardware does not prefetch them.
struct IndexBlocks {
  const uint8_t* at;
  const int32_t* table;
  int64_t stride;
  int lines;  // of a block

  template <class Run>
  IndexBlocks(const Run& run, int sequence)
      : at(run.layer().blocks + run.layer().index_offset),
        table(run.r.table_of(sequence)),
        stride(run.layer().block_stride),
        lines(int((run.r.kernels.attention.block_bytes(run.layer().index) + 63) / 64)) {}

  const uint8_t* block(int64_t i) const { return at + table[i] * stride; }
  // Calls visit(first, blocks, count) for pieces of the blocks [begin, end), while the next piece is on its way.
  template <class Visit>
  void each_piece(int64_t begin, int64_t end, Visit&& visit) const {
    for (int64_t i = begin; i < end; i += kIndexPiece) {
      const uint8_t* piece[kIndexPiece];
      const int count = int(std::min(kIndexPiece, end - i));
      for (int b = 0; b < count; b++) {
        piece[b] = block(i + b);
        if (i + kIndexPiece + b < end) fetch_lines(block(i + kIndexPiece + b), lines);
      }
      visit(i, piece, count);
    }
  }
};

// A step that lists the positions, entries or blocks that each token reads, if it does not read all. `Run` has
//   score_floats(r, step): floats of a token's scores;
//   room(...).scores: a thread's room for them;
//   blocks(position): number of blocks to score for a token at a position; 0: it has no list;
//   score(t, token, begin, end, out): writes the scores of blocks [begin, end) for token t of the batch;
//   list(t, position, scores): writes the token's list.
template <class Run, class StepFields>
struct SelectRun : Carved<Run, LayerRun<StepFields>> {
  using LayerRun<StepFields>::r;
  using LayerRun<StepFields>::thread;
  using LayerRun<StepFields>::step;
  using LayerRun<StepFields>::layer;

  static int64_t workspace_bytes(const Inference& r, const StepFields& step) {
    return 4 * r.program.max_sequences * Run::score_floats(r, step);
  }

  int32_t* list_of(int64_t token) { return reinterpret_cast<int32_t*>(r.floats(step.out).row(token)); }
  // Stores a token's key in the layer's index.
  void store_index(int sequence, int64_t position, const float* key) {
    uint8_t* const block = layer().blocks + layer().index_offset + this->block_offset(sequence, position);
    r.kernels.attention.store(layer().index, block, int(position % kBlockTokens), key, nullptr);
  }

  // Lists for all tokens, whose keys are stored. Ends the step.
  void select() {
    Run& run = static_cast<Run&>(*this);
    if (this->one_token_each()) {
      select_single(run);
    } else {
      r.for_each_item(thread, this->index, r.batch.tokens, [&](int64_t t) {
        const Inference::Token token = r.token_of(t);
        const int64_t blocks = run.blocks(token.position);
        if (blocks == 0) return;
        float* const scores = run.buffers().scores;
        run.score(t, token, 0, blocks, scores);
        run.list(t, token.position, scores);
      });
    }
    r.finish(thread, this->index, step.out, r.batch.tokens);
  }

 private:
  // One token per sequence: threads divide the blocks of all sequences.
  void select_single(Run& run) {
    float* const scores = reinterpret_cast<float*>(r.workspace());  // (sequences, score_floats)
    const int64_t sequences = r.batch.sequences, stride = Run::score_floats(r, step);
    const auto blocks_of = [&](int64_t s) { return run.blocks(r.batch.chunks[s].first_position); };
    int64_t all = 0, before = 0;
    for (int64_t s = 0; s < sequences; s++) all += blocks_of(s);
    if (all == 0) return;
    const Range part = r.part_of(thread, all);
    for (int64_t s = 0; s < sequences; s++) {
      const int64_t blocks = blocks_of(s);
      const int64_t begin = std::max<int64_t>(part.begin - before, 0), end = std::min(part.end - before, blocks);
      if (begin < end) run.score(s, r.token_of(s), begin, end, scores + s * stride);
      before += blocks;
    }
    r.meet(thread, this->index);
    for (int64_t s = thread; s < sequences; s += r.active())
      if (blocks_of(s) > 0) run.list(s, r.batch.chunks[s].first_position, scores + s * stride);
  }
};

}  // namespace ckdist
