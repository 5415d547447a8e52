// A step as rank 0 publishes it: struct ckdist_run and int32 arrays. `parse` checks all of it once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

#include "api/commands_api.h"
#include "api/program_api.h"
#include "core/error.h"

namespace ckdist {

// The slot of an adapter, or -1, and its scale.
struct AdapterUse {
  int32_t slot;
  double scale;
};

struct BatchView {
  using Chunk = ckdist_sequence_chunk;

  int64_t tokens = 0, sequences = 0, selected = 0;
  int threads = 1, plan = 0, steps = 0;
  const int32_t* token_ids = nullptr;          // (tokens,); -1 - i: the i-th row of embeddings
  const Chunk* chunks = nullptr;               // (sequences,)
  const int32_t* block_tables = nullptr;       // the sequences' tables end to end
  const ckdist_state_slots* states = nullptr;  // (sequences,), or null
  const int32_t* firsts = nullptr;             // (sequences,): tokens of the first of a sequence's two texts; or null
  const int32_t* selected_tokens = nullptr;    // (selected,), ascending: tokens whose logits are computed
  const int32_t* positions = nullptr;          // (tokens, 3): positions of three axes; null: places in the sequence
  const int32_t* adapters = nullptr;           // (adapter_lists, sequences, kAdapterInts); null: none has one
  int64_t adapter_lists = 0;                   // most adapters of a sequence
  const float* embeddings = nullptr;  // (rows, width): inputs in place of rows of the embedding table, or besides them
  int64_t embedding_rows = 0;

  static constexpr int kHeader = sizeof(ckdist_run) / sizeof(int32_t);
  static constexpr int kAdapterInts = 3;  // slot, and the scale

  // i: list * sequences + sequence.
  AdapterUse adapter(int64_t i) const {
    AdapterUse use{adapters[kAdapterInts * i], 0};
    std::memcpy(&use.scale, adapters + kAdapterInts * i + 1, sizeof use.scale);
    return use;
  }

  // Throws unless every count, token, position, block and index lies within the limits.
  static BatchView parse(const int32_t* m, int64_t ints, const ckdist_program& program) {
    BatchView b;
    if (ints < kHeader) fail(Status::native, "batch of %lld ints has no header", (long long)ints);
    const ckdist_run& h = *reinterpret_cast<const ckdist_run*>(m);
    const int64_t table = h.blocks;
    b.tokens = h.tokens, b.sequences = h.sequences, b.selected = h.selected;
    b.threads = h.threads, b.plan = h.plan, b.steps = h.steps;
    if (b.tokens < 1 || b.tokens > program.max_tokens || b.sequences < 1 || b.sequences > program.max_sequences ||
        b.selected < 0 || b.selected > program.max_outputs || table < 0 || (h.states != 0 && h.states != b.sequences) ||
        (h.firsts != 0 && h.firsts != b.sequences) || h.embeddings < 0 || h.embeddings > program.embedding_rows ||
        (h.positions != 0 && h.positions != b.tokens) || h.adapters < 0 || h.adapters % b.sequences != 0 ||
        ints != kHeader + b.tokens + 3 * b.sequences + table + 4 * int64_t{h.states} + h.firsts + b.selected +
                    kAdapterInts * int64_t{h.adapters} + 3 * int64_t{h.positions} +
                    h.embeddings * program.embedding_width)
      fail(Status::native,
           "batch of %lld tokens, %lld sequences, %lld outputs, %d embeddings exceeds %lld, %lld, %lld, %lld or has a "
           "wrong length",
           (long long)b.tokens, (long long)b.sequences, (long long)b.selected, h.embeddings,
           (long long)program.max_tokens, (long long)program.max_sequences, (long long)program.max_outputs,
           (long long)program.embedding_rows);
    if (h.adapters > 0 && program.adapters == 0)
      fail(Status::native, "a batch names adapters, and the model has no slots for adapters");
    b.adapter_lists = h.adapters / b.sequences;
    if (b.adapter_lists > std::min<int64_t>(program.adapters, ckdist_most_adapters))
      fail(Status::native, "a sequence has %lld adapters, and the model %d slots", (long long)b.adapter_lists,
           program.adapters);
    b.token_ids = m + kHeader;
    b.chunks = reinterpret_cast<const Chunk*>(b.token_ids + b.tokens);
    b.block_tables = b.token_ids + b.tokens + 3 * b.sequences;
    const int32_t* at = b.block_tables + table;
    const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
    const auto given = [&](int64_t n) { return n > 0 ? take(n) : nullptr; };
    b.states = reinterpret_cast<const ckdist_state_slots*>(given(4 * int64_t{h.states}));
    b.firsts = given(h.firsts);
    b.selected_tokens = take(b.selected);
    b.adapters = given(kAdapterInts * int64_t{h.adapters});
    b.positions = given(3 * int64_t{h.positions});
    if (b.positions != nullptr) b.check_positions(program);
    b.embeddings = reinterpret_cast<const float*>(at);
    b.embedding_rows = h.embeddings;
    for (int64_t i = 0; i < b.tokens; i++)
      if (b.token_ids[i] < -h.embeddings || b.token_ids[i] >= program.vocab)
        fail(Status::native, "token id %d is outside the vocabulary of %lld and %d rows of embeddings", b.token_ids[i],
             (long long)program.vocab, h.embeddings);
    int64_t tokens = 0, used = 0;
    for (int64_t r = 0; r < b.sequences; r++) {
      const Chunk& chunk = b.chunks[r];
      const int64_t end = int64_t(chunk.first_position) + chunk.tokens;
      if (chunk.tokens < 1 || chunk.first_position < 0 || end > program.context_length || chunk.blocks < 0 ||
          int64_t(chunk.blocks) * ckdist_block_tokens < end)
        fail(Status::native, "sequence of %d tokens from position %d has %d blocks in a context of %lld", chunk.tokens,
             chunk.first_position, chunk.blocks, (long long)program.context_length);
      if (b.firsts != nullptr && (b.firsts[r] < 0 || b.firsts[r] > int64_t(chunk.blocks) * ckdist_block_tokens))
        fail(Status::native, "the first text of a sequence has %d tokens, and its %d blocks hold %d", b.firsts[r],
             chunk.blocks, chunk.blocks * ckdist_block_tokens);
      tokens += chunk.tokens, used += chunk.blocks;
    }
    for (int64_t i = 0; i < h.adapters; i++)
      if (const AdapterUse a = b.adapter(i); a.slot < -1 || a.slot >= program.adapters || !std::isfinite(a.scale))
        fail(Status::native, "a sequence has adapter %d of %d, and its scale is %g", a.slot, program.adapters, a.scale);
    if (tokens != b.tokens || used != table)
      fail(Status::native, "the sequences' tokens or blocks do not add up to the batch's");
    for (int64_t i = 0; i < table; i++)
      if (b.block_tables[i] < 0 || b.block_tables[i] >= program.blocks)
        fail(Status::native, "block %d is outside the cache of %lld", b.block_tables[i], (long long)program.blocks);
    for (int64_t i = 0; i < b.selected; i++) {
      if (b.selected_tokens[i] < 0 || b.selected_tokens[i] >= b.tokens)
        fail(Status::native, "output %d is outside the batch of %lld tokens", b.selected_tokens[i],
             (long long)b.tokens);
      if (i > 0 && b.selected_tokens[i] <= b.selected_tokens[i - 1])  // ranks bisect these; one row per token
        fail(Status::native, "output %d comes after output %d; they must ascend", b.selected_tokens[i],
             b.selected_tokens[i - 1]);
    }
    return b;
  }

  void check_positions(const ckdist_program& program) const {
    const auto has_axes = [](const struct ckdist_rope& rope) { return rope.axes != nullptr; };
    if (std::none_of(program.ropes, std::end(program.ropes), has_axes))
      fail(Status::native, "a batch has positions of three axes, and the positions of the model have one");
    for (int64_t i = 0; i < 3 * tokens; i++)
      if (positions[i] < 0 || positions[i] >= program.context_length)
        fail(Status::native, "position %d is outside the context of %lld", positions[i],
             (long long)program.context_length);
  }
};

}  // namespace ckdist
