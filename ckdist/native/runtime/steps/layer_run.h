// Common parts of the steps that read or write a layer's blocks of the cache.
#pragma once
#include "kernels/prefetch.h"
#include "runtime/inference.h"

namespace ckdist {

constexpr int64_t kTokensAhead = 2;  // keys of this many tokens are prefetched while one is stored

template <class Fields>
struct LayerRun : InferenceRun<Fields> {
  using InferenceRun<Fields>::r;
  using InferenceRun<Fields>::thread;
  using InferenceRun<Fields>::index;
  using InferenceRun<Fields>::step;

  static int64_t blocks_of(int64_t positions) { return (positions + kBlockTokens - 1) / kBlockTokens; }
  const Inference::Layer& layer() const { return r.layers[step.layer]; }
  bool one_token_each() const { return r.batch.tokens == r.batch.sequences; }
  // Bytes from the layer's first block to the block of a position.
  int64_t block_offset(int sequence, int64_t position) const {
    return r.table_of(sequence)[position / kBlockTokens] * layer().block_stride;
  }

  // The rotation of a token, whose position in its sequence is `place`; of no dimensions if the step has none.
  Rope rotation(int64_t token, int64_t place) const {
    return step.rope_table < 0 ? Rope{} : r.rotation(step.rope_table, token, place);
  }
  // Rotates a head from its dimension `first` on. Dimensions outside the rotated ones are copied.
  void rotate(const float* x, const Rope& rope, int64_t width, float* out, int first = 0) const {
    const int64_t dims = rope.dims;
    if (dims > 0) {
      const ElementwiseKernel& k = r.kernels.elementwise;
      (rope.interleaved ? k.rope_pairs : k.rope)(x + first, rope.cos, rope.sin, dims, out + first);
    }
    if (out == x) return;
    std::copy(x, x + first, out);
    if (first + dims < width) std::copy(x + first + dims, x + width, out + first + dims);
  }

  // Calls store(sequence, token, kv_head) for this thread's part of the kv-heads and blocks of a batch.
  template <class Store>
  void each_stored(int kv_heads, Store&& store) {
    each_stored_block(kv_heads, [&](int sequence, int64_t first, int64_t end, int kv_head) {
      for (int64_t token = first; token < end; token++) store(sequence, token, kv_head);
    });
  }

  // The same with store(sequence, first token, end, kv_head) for the tokens of a block. Heads, or parts of a head's
  // tokens, are divided over the threads in the same way for storing and for attending. One thread stores all positions
  // of a block, because they share cache lines.
  template <class Store>
  void each_stored_block(int kv_heads, Store&& store) {
    int64_t blocks = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      blocks += (chunk.first_position + chunk.tokens - 1) / kBlockTokens - chunk.first_position / kBlockTokens + 1;
    }
    const Range own = r.part_of(thread, kv_heads * blocks);
    for (int64_t sequence = 0, block = 0, first = 0, end = 0; sequence < r.batch.sequences; sequence++) {
      end += r.batch.chunks[sequence].tokens;
      for (int64_t position = r.batch.chunks[sequence].first_position, next; first < end; first = next, block++) {
        next = std::min(first + kBlockTokens - position % kBlockTokens, end);
        position += next - first;
        for (int h = 0; h < kv_heads; h++) {
          if (h * blocks + block < own.begin || h * blocks + block >= own.end) continue;
          store(int(sequence), first, next, h);
        }
      }
    }
  }
};

}  // namespace ckdist
