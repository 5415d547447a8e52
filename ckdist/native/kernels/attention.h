// Attention over a block-based KV cache: the cache's layout and the task that a kernel executes.
//
// A block holds kBlockTokens = 16 positions of one layer for all kv-heads of the rank. For one kv-head it is a K tile
// [head_dim][16 positions] followed by a V tile [16 positions][head_dim] (q8_0: int8 codes, then their scales), so neither
// the scores nor the weighted sum needs a horizontal sum. Keys are stored after rotation.
//
// Batch-invariant: the order of every sum depends on absolute positions alone, never on how a prompt was cut into chunks
// or on which other sequences share the batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ckdist {

constexpr int kBlockTokens = 16;

enum class KvType : int32_t { f32 = 0, f16 = 1, q8_0 = 8, bf16 = 30 };  // numbered as weight types are

// Consecutive query tokens of one sequence against that sequence's cache, for the query heads that share one kv-head.
// The task's own keys are in the cache already. Query i stands at first_position + i and sees positions <= its own.
struct AttentionTask {
  KvType kv_type;
  int head_dim;
  const uint8_t* kv;            // block 0 of this layer and kv-head
  int64_t block_stride;         // bytes from one block to the next
  const int32_t* block_table;   // block of positions [16 i, 16 i + 16)
  int64_t first_position;
  int tokens;
  int heads;
  const float* q;               // (tokens, heads, head_dim) through the strides, in floats
  int64_t q_token_stride, q_head_stride;
  float* out;                   // likewise
  int64_t out_token_stride, out_head_stride;
  float scale;                  // scores are scale * q.k
  float soft_cap;               // 0: none; else cap * tanh(score / cap)
  int64_t window;               // 0: all; else only positions > own - window
};

struct AttentionKernel {
  // Bytes of one block for one kv-head (K tile and V tile), a multiple of 64.
  int64_t (*block_bytes)(KvType type, int head_dim);
  // Write one position's key and value (head_dim floats each) into its slot (0..15) of a block of one kv-head.
  void (*store)(KvType type, uint8_t* block, int slot, int head_dim, const float* k, const float* v);
  // Scratch that attend() needs for a task of at most `tokens` x `heads` queries, in bytes, 64-byte aligned.
  int64_t (*scratch_bytes)(int tokens, int heads, int head_dim);
  void (*attend)(const AttentionTask& task, uint8_t* scratch);
};

}  // namespace ckdist
