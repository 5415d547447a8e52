// What sequences keep beside their tokens' keys and values: the states of linear attention, one slot per sequence.
//
// A slot holds the states of all layers after some number of tokens, which is known here: a step that would go on from
// the state of other tokens is refused.
#pragma once
#include <cstdint>
#include <vector>

#include "core/export.h"

#include "api/executable.h"
#include "runtime/batch.h"

namespace ckdist {

class StateSlots {
 public:
  // One layer's states on this rank. Of a slot each value head has `head_floats` consecutive floats: its state, as
  // kernels/delta_rule.h has it, then what its convolutions see of the tokens before, (taps - 1, channels), the oldest
  // first; a token's channels are its query's, its key's and its value's.
  struct Layer {
    int value_heads = 0, key_width = 0, value_width = 0, taps = 0;
    const int32_t* key_head_of = nullptr;
    int64_t state_floats = 0, head_floats = 0;
    float* first = nullptr;         // of slot 0
    std::vector<float> kernels[3];  // of q, k and v: (taps, channels of all local heads)

    int channels() const { return 2 * key_width + value_width; }
    float* head(int64_t slot, int head) const { return first + (slot * value_heads + head) * head_floats; }
    float* tail(float* head) const { return head + state_floats; }
  };

  explicit StateSlots(const ckdist_program& program);

  int64_t bytes() const { return bytes_; }
  void place(uint8_t* memory);  // of bytes() zeros
  // Turns the convolutions' weights, (channels, taps) in the file, into rows of channels.
  void read_kernels(const ckdist_execution_plan& plan);

  // The next batch, which runs behind all that were accepted before: from now on slots hold what it leaves. Throws
  // unless every chunk goes on from a state of the tokens before it, and none writes what another one uses.
  void accept(const BatchView& batch);

  std::vector<Layer> layers;

 private:
  void check(const BatchView& batch) const;

  const int64_t slots_;
  int64_t bytes_ = 0;
  std::vector<int32_t> positions_;  // (slots,) tokens behind which the slot is; -1: it holds nothing
  mutable std::vector<uint8_t> written_;
};

}  // namespace ckdist
