// Parts of the steps that choose positions for sparse attention.
#pragma once
#include "kernels/prefetch.h"
#include "runtime/steps/attention_run.h"
#include "runtime/steps/select_largest.h"

namespace ckdist {

// Calls score(sequence, begin, end) for this thread's part of the blocks of all sequences, then list(sequence) for its
// part of the sequences. blocks_of(sequence): number of its blocks to score; 0: it is not listed.
template <class Run, class BlocksOf, class Score, class List>
void select_by_sequence(const Run& run, BlocksOf&& blocks_of, Score&& score, List&& list) {
  const auto& r = run.r;
  const int64_t sequences = r.batch.sequences;
  int64_t all = 0, before = 0;
  for (int64_t s = 0; s < sequences; s++) all += blocks_of(s);
  if (all == 0) return;
  const Range part = {all * run.thread / r.active(), all * (run.thread + 1) / r.active()};
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t blocks = blocks_of(s);
    const int64_t begin = std::max<int64_t>(part.begin - before, 0), end = std::min(part.end - before, blocks);
    if (begin < end) score(s, begin, end);
    before += blocks;
  }
  run.r.meet(run.thread, run.index);
  for (int64_t s = run.thread; s < sequences; s += r.active())
    if (blocks_of(s) > 0) list(s);
}

constexpr int64_t kIndexPiece = 2;  // blocks that are scored together

// Queries of an index, as kernels read them. Carved from a thread's memory.
struct IndexQueries {
  float *q, *scales;
  int16_t* codes;

  static IndexQueries carve(Carver& c, int64_t heads, int64_t width) {
    float* const q = c.floats(heads * width);
    float* const scales = c.floats(heads);
    return {q, scales, reinterpret_cast<int16_t*>(c.bytes(2 * heads * width))};
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
        table(run.r.batch.block_tables + run.start_of(sequence).block),
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

}  // namespace ckdist
