// A batch as rank 0 publishes it: a fixed header and five int32 arrays, checked once before anything trusts it.
#pragma once
#include <cstdint>

#include "core/error.h"

namespace ckdist {

struct BatchView {
  struct Run {
    int32_t tokens, first_position, blocks;
  };

  int64_t tokens = 0, runs = 0, outputs = 0;
  int threads = 1, phase = 0, steps = 0;
  const int32_t* token_ids = nullptr;      // (tokens,)
  const Run* run = nullptr;                // (runs,)
  const int32_t* block_tables = nullptr;   // the runs' tables end to end
  const int32_t* output_tokens = nullptr;  // (outputs,), ascending

  static constexpr int kHeader = 7;  // tokens, runs, blocks, outputs, threads, phase, steps

  // Throws unless every count, token, position, block and index lies within the limits.
  static BatchView parse(const int32_t* m, int64_t ints, int64_t max_tokens, int64_t max_runs, int64_t max_outputs,
                         int64_t context, int64_t blocks, int64_t vocab) {
    BatchView b;
    if (ints < kHeader) fail(Status::native, "batch of %lld ints has no header", (long long)ints);
    const int64_t table = m[2];
    b.tokens = m[0], b.runs = m[1], b.outputs = m[3], b.threads = m[4], b.phase = m[5], b.steps = m[6];
    if (b.tokens < 1 || b.tokens > max_tokens || b.runs < 1 || b.runs > max_runs || b.outputs < 0 ||
        b.outputs > max_outputs || table < 0 || ints != kHeader + b.tokens + 3 * b.runs + table + b.outputs)
      fail(Status::native,
           "batch of %lld tokens, %lld sequences, %lld outputs exceeds %lld, %lld, %lld or has a wrong length",
           (long long)b.tokens, (long long)b.runs, (long long)b.outputs, (long long)max_tokens, (long long)max_runs,
           (long long)max_outputs);
    b.token_ids = m + kHeader;
    b.run = reinterpret_cast<const Run*>(b.token_ids + b.tokens);
    b.block_tables = b.token_ids + b.tokens + 3 * b.runs;
    b.output_tokens = b.block_tables + table;
    for (int64_t i = 0; i < b.tokens; i++)
      if (b.token_ids[i] < 0 || b.token_ids[i] >= vocab)
        fail(Status::native, "token id %d is outside the vocabulary of %lld", b.token_ids[i], (long long)vocab);
    int64_t tokens = 0, used = 0;
    for (int64_t r = 0; r < b.runs; r++) {
      const Run& run = b.run[r];
      const int64_t end = int64_t(run.first_position) + run.tokens;
      if (run.tokens < 1 || run.first_position < 0 || end > context || run.blocks < 0 || int64_t(run.blocks) * 16 < end)
        fail(Status::native, "sequence of %d tokens from position %d has %d blocks in a context of %lld", run.tokens,
             run.first_position, run.blocks, (long long)context);
      tokens += run.tokens, used += run.blocks;
    }
    if (tokens != b.tokens || used != table)
      fail(Status::native, "the sequences' tokens or blocks do not add up to the batch's");
    for (int64_t i = 0; i < table; i++)
      if (b.block_tables[i] < 0 || b.block_tables[i] >= blocks)
        fail(Status::native, "block %d is outside the cache of %lld", b.block_tables[i], (long long)blocks);
    for (int64_t i = 0; i < b.outputs; i++) {
      if (b.output_tokens[i] < 0 || b.output_tokens[i] >= b.tokens)
        fail(Status::native, "output %d is outside the batch of %lld tokens", b.output_tokens[i], (long long)b.tokens);
      if (i > 0 &&
          b.output_tokens[i] <= b.output_tokens[i - 1])  // ranks find theirs by it, and have room for one row a token
        fail(Status::native, "output %d comes after output %d; they must ascend", b.output_tokens[i],
             b.output_tokens[i - 1]);
    }
    return b;
  }
};

}  // namespace ckdist
