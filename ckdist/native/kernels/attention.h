// Attention over a block-based KV cache: the cache's layout and the task that a kernel executes.
//
// A block holds kBlockTokens = 16 positions of one layer for all kv-heads of the rank; isa/attention_block.h has its
// bytes. Keys are stored after rotation.
//
// The context is split into spans of kSpan positions that begin at multiples of kSpan. A query's result for a span
// depends only on that span; the spans' parts are merged one after another. So the order of every sum depends only on
// absolute positions. It does not depend on how a prompt was split into chunks, on the other sequences of the batch, or
// on the number of threads that divided the context.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ckdist {

constexpr int kBlockTokens = 16;
constexpr int kSpan = 256;

// Numbers of weight types. i16: whole numbers of 16 bits with a scale per position. It has the precision and size of
// f16, and products read it without conversion (see isa/attention_integer.cpp). q8_0 and q4_0 hold the Hadamard
// transforms of keys and values (see isa/attention_rotation.h).
enum class KvType : int32_t { f32 = 0, f16 = 1, q4_0 = 2, q8_0 = 8, i16 = 25, bf16 = 30 };

// The cache of one token and kv-head. `latent`: no values are stored. They are the first elements of the keys, which
// all heads of latent attention share, with the keys' type. The elements after them have scales of their own.
struct CacheShape {
  KvType key_type, value_type;
  int key_width, value_width;
  bool latent;
};

// Consecutive query tokens of one sequence against that sequence's cache, for the query heads that share one kv-head.
// The task's own keys are already in the cache. Query i has position first_position + i. It sees positions <= its own,
// or all of `context` if attention is not causal.
struct AttentionTask {
  KvType key_type, value_type;
  int key_width, value_width;  // floats of a head's query and key, and of its value and output
  bool latent;                 // as in CacheShape
  const uint8_t* kv;           // block 0 of this layer and kv-head
  int64_t block_stride;        // bytes from one block to the next
  const int32_t* block_table;  // block of positions [16 i, 16 i + 16)
  // The next task of this thread, to prefetch: block 0 of its kv-head, and the blocks of its sequence that are read
  // first. Null: unknown.
  const uint8_t* next_kv;
  const int32_t* next_table;  // (next_blocks,)
  int64_t next_blocks;
  int64_t first_position;
  int tokens;
  int heads;
  const float* q;  // (tokens, heads, key_width) through the strides, in floats
  int64_t q_token_stride, q_head_stride;
  float* out;  // (tokens, heads, value_width), through the strides, in floats
  int64_t out_token_stride, out_head_stride;
  float scale;     // scores are scale * q.k
  float soft_cap;  // 0: none; else cap * tanh(score / cap)
  // 0: all; > 0: only positions > own - window, and < own + window; < 0: only positions of the own chunk, which begins
  // at a multiple of -window.
  int64_t window;
  const float*
      // (heads,): for each head a score without a value; null: none. Xiao et al. 2023, arXiv:2309.17453.
      sinks;
  // Not causal: the number of tokens that each query sees, within the window if there is one. 0: causal.
  int64_t context;
  // (heads, 2 * bias_reach + 1): added to the score of a key, by distance (key position - query position). Larger
  // distances use the value at the end. Null: none. Raffel et al. 2020, arXiv:1910.10683, section 2.1.
  const float* bias;
  int64_t bias_reach;

  CacheShape cache() const { return {key_type, value_type, key_width, value_width, latent}; }
  // The query at a position sees positions [from, to).
  int64_t from(int64_t position) const {
    if (window < 0) return position / -window * -window;
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
  int64_t to(int64_t position) const {
    if (context == 0) return position + 1;
    return window > 0 && position + window < context ? position + window : context;
  }
  // Positions that at least one query sees.
  int64_t begin() const { return from(first_position); }
  int64_t end() const { return to(first_position + tokens - 1); }
  int64_t first_span() const { return begin() / kSpan; }
  int64_t last_span() const { return (end() + kSpan - 1) / kSpan; }  // one past the last
};

// One token's queries of a lightning indexer, which chooses the positions that attention reads. A cache of index keys
// is the cache of one head with latent values, in f32, f16 or i16. DeepSeek-AI 2025, arXiv:2512.02556, section 2.1.
struct IndexTask {
  KvType type;
  int width, heads;
  const float *q, *weights;        // (heads, width), (heads,); without weights each head has scores of its own
  const int16_t* codes = nullptr;  // of i16, by index_codes(); else null
  const float* scales = nullptr;
};

struct AttentionKernel {
  // Bytes of one block for one kv-head (K tile and V tile), a multiple of 64.
  int64_t (*block_bytes)(const CacheShape& cache);
  // Writes one position's key and value to slot 0..15 of a block of one kv-head. v is null if the value is a part of
  // the key.
  void (*store)(const CacheShape& cache, uint8_t* block, int slot, const float* k, const float* v);
  // The same for all sixteen positions of a block, with a row of k and v each. Rows of v may be null as above.
  void (*store_block)(const CacheShape& cache, uint8_t* block, const float* const* k, const float* const* v);
  // Bytes of scratch memory (64-byte aligned) for a task of at most `tokens` x `heads` queries, and bytes of one span's
  // part of such a task.
  int64_t (*scratch_bytes)(const CacheShape& cache, int tokens, int heads);
  int64_t (*part_bytes)(const CacheShape& cache, int tokens, int heads);
  void (*attend)(const AttentionTask& task, uint8_t* scratch);
  // The same in two calls. attend_spans: spans [first, last) of the task into parts[0 .. last - first), on any number
  // of threads. Then merge: all parts, from first_span() on, into `out`. The bits are equal to those of attend().
  void (*attend_spans)(const AttentionTask& task, int64_t first, int64_t last, uint8_t* parts, uint8_t* scratch);
  void (*merge)(const AttentionTask& task, uint8_t* parts, uint8_t* scratch);
  // Queries of an index in i16: codes (heads, width), scales (heads,).
  void (*index_codes)(const float* q, int width, int heads, int16_t* codes, float* scales);
  // out[i] = sum over heads of weight * max(q . key i, 0), for the 16 positions of each of `count` blocks. Without
  // weights, of each block: out[16 * head + i] = q . key i.
  void (*index_scores)(const IndexTask& task, const uint8_t* const* blocks, int count, float* out);
  // Copies the key and value of one position from slot to slot.
  void (*copy)(const CacheShape& cache, const uint8_t* from, int from_slot, uint8_t* to, int to_slot);
};

}  // namespace ckdist
