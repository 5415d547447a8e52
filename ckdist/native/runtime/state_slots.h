// The states of linear attention and short convolutions, and rings of the last rows: one slot per sequence, beyond the
// keys and values of tokens.
//
// A slot holds the states of all layers after a known number of tokens. A step that would continue from the state of
// other tokens is refused.
#pragma once
#include <vector>

#include "api/executable_api.h"
#include "runtime/batch.h"

namespace ckdist {

class StateSlots {
 public:
  // One layer's states on this rank. In a slot each value head has `head_floats` consecutive floats: its state if there
  // is one (see kernels/delta_rule.h), then the inputs of its convolutions, (taps - 1, channels), oldest token first. A
  // token's channels are those of its query, its key and its value. Rings (steps/recent_rows.h) are those of one head.
  struct Layer {
    int value_heads = 0, key_width = 0, value_width = 0, channels = 0, taps = 0;
    const int32_t* key_head_of = nullptr;
    int64_t state_floats = 0, head_floats = 0;
    float* first = nullptr;         // of slot 0
    std::vector<float> zeros;       // (channels,): the tail before a sequence
    std::vector<float> kernels[3];  // of q, k and v, or of one part: (taps, channels of all local heads).
                                    // Mamba-1: of x; then -exp(a_log), (rows of a state, channels)

    float* head(int64_t slot, int head) const { return first + (slot * value_heads + head) * head_floats; }
    float* tail(float* head) const { return head + state_floats; }
    float* slot(int64_t slot) const { return first + slot * value_heads * head_floats; }
    int64_t slot_bytes() const { return value_heads * head_floats * int64_t{sizeof(float)}; }
  };

  explicit StateSlots(const ckdist_program& program);

  int64_t bytes() const { return bytes_; }
  int64_t slot_bytes() const { return slots_ ? bytes_ / slots_ : 0; }
  void place(uint8_t* memory);  // bytes() zeros
  // Transposes the convolutions' weights, (channels, taps) in the file, to (taps, channels).
  void read_kernels(const ckdist_execution_plan& plan);

  // Accepts the next batch, which runs after all batches accepted before. From now on positions_ describes the slots
  // after it. Throws unless every chunk continues from a state of the tokens before it, and no chunk writes a slot that
  // another one uses.
  void accept(const BatchView& batch);
  // The slot will hold the state after `tokens` tokens once a copy has ended.
  void load(int32_t slot, int32_t tokens) { positions_[size_t(slot)] = tokens; }

  std::vector<Layer> layers;

 private:
  void check(const BatchView& batch) const;

  const int64_t slots_;
  int64_t bytes_ = 0;
  std::vector<int32_t> positions_;  // (slots,): number of tokens in the slot's state; -1: empty
  mutable std::vector<uint8_t> written_;
};

}  // namespace ckdist
