// The work of steps that keep a state of every sequence: an item is one head of one sequence's chunk.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

constexpr int kStateTile = kBlockTokens;  // most tokens of a head at a time
constexpr int kMaxTaps = 16;

// One head of one sequence's chunk.
struct StateItem {
  const StateSlots::Layer& layer;
  int head;
  int64_t first_token, tokens, position;  // of the chunk: first token in the batch; first position
  const float* tail;                      // (taps - 1, channels): channels of the tokens before the chunk
  int64_t tail_stride;                    // 0: there is no earlier token; tail is one row of zeros
};

// Runs one item. A `Run` has
//   tile(item, done, count, state): runs tokens [done, done + count) of the chunk through the head's state;
//   write_tail(item, done, tail): writes the tail after the chunk's first `done` tokens.
template <class Run>
void run_state_head(Run& run, const StateSlots::Layer& layer, int64_t i) {
  const int64_t sequence = i / layer.value_heads;
  const int head = int(i % layer.value_heads);
  const ckdist_state_slots& slots = run.r.batch.states[sequence];
  const BatchView::Chunk& chunk = run.r.batch.chunks[sequence];
  const int64_t first_token = run.r.starts[size_t(sequence)].token;
  StateItem item{layer, head, first_token, chunk.tokens, chunk.first_position, layer.zeros.data(), 0};
  float* const state = layer.head(slots.out, head);
  if (slots.in < 0) {
    std::memset(state, 0, layer.state_floats * sizeof(float));
  } else {
    const float* const before = layer.head(slots.in, head);
    item.tail = before + layer.state_floats, item.tail_stride = layer.channels;
    if (before != state) std::memcpy(state, before, layer.state_floats * sizeof(float));
  }
  const int64_t saved_tokens = slots.save < 0 ? 0 : slots.save_position - item.position;
  for (int64_t done = 0; done < item.tokens;) {
    const int64_t end = done < saved_tokens ? saved_tokens : item.tokens;
    const int64_t count = std::min<int64_t>(kStateTile, end - done);
    run.tile(item, done, int(count), state);
    done += count;
    if (done == saved_tokens) {
      float* const saved = layer.head(slots.save, head);
      std::memcpy(saved, state, layer.state_floats * sizeof(float));
      run.write_tail(item, done, layer.tail(saved));
    }
  }
  run.write_tail(item, item.tokens, layer.tail(state));
}

// Runs all heads of all sequences and ends the step.
template <class Run>
void run_state_heads(Run& run) {
  auto& r = run.r;
  const StateSlots::Layer& layer = r.states.layers[run.step.layer];
  const int64_t items = r.batch.sequences * layer.value_heads;
  if (r.batch.tokens != r.batch.sequences) {
    r.for_each_item(run.thread, run.index, items, [&](int64_t i) { run_state_head(run, layer, i); });
  } else if (items % r.active() == 0) {
    run.each_own_item(items, [&](int64_t i) { run_state_head(run, layer, i); });
  } else {
    r.take_items(run.thread, run.index, items, [&](int64_t i) { run_state_head(run, layer, i); });
  }
  r.finish(run.thread, run.index, run.step.out, r.batch.tokens);
}

}  // namespace ckdist
