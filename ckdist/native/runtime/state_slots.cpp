#include "runtime/state_slots.h"

#include "api/steps_inference_api.h"
#include "runtime/cache_arrays.h"
#include "runtime/executor.h"

namespace ckdist {

StateSlots::StateSlots(const ckdist_program& program)
    : slots_(program.state_slots), positions_(program.state_slots, -1), written_(program.state_slots) {
  for (const ckdist_layer* own = program.layers; own != program.layers + program.layer_count; own++) {
    const CacheArrays arrays(*own);
    Layer& layer = layers.emplace_back();
    const ckdist_cache_array* const convolution = arrays.find(ckdist_array_convolution);
    layer.value_heads = convolution ? convolution->heads : 1;
    if (convolution) layer.channels = convolution->width, layer.taps = convolution->rows + 1;
    layer.zeros.resize(size_t(layer.channels));
    if (const ckdist_cache_array* const state = arrays.find(ckdist_array_state))
      layer.key_width = state->rows, layer.value_width = state->width, layer.key_head_of = own->key_head_of;
    layer.state_floats = arrays.state_floats(), layer.head_floats = arrays.head_floats();
    bytes_ += slots_ * arrays.slot_bytes();
  }
}

void StateSlots::place(uint8_t* memory) {
  for (Layer& layer : layers) {
    layer.first = reinterpret_cast<float*>(memory);
    memory += slots_ * layer.slot_bytes();
  }
}

namespace {

// f of the elements of a matrix (columns, rows), transposed.
template <class Function>
std::vector<float> transposed(const float* stored, int64_t columns, int64_t rows, Function&& f) {
  std::vector<float> out(size_t(columns * rows));
  for (int64_t c = 0; c < columns; c++)
    for (int64_t row = 0; row < rows; row++) out[size_t(row * columns + c)] = f(stored[c * rows + row]);
  return out;
}

}  // namespace

void StateSlots::read_kernels(const ckdist_execution_plan& plan) {
  const auto convolution = [&](Layer& layer, int part, int32_t vector, int64_t channels, float scale) {
    layer.kernels[part] = transposed(plan.vectors[vector], channels, layer.taps, [=](float x) { return scale * x; });
  };
  for (int i = 0; i < plan.lists[0].count; i++) {
    const ckdist_step* const those = plan.lists[0].steps[i];
    if (const auto* step = fields_of<ckdist_gated_conv_step>(those, ckdist_step_gated_conv)) {
      Layer& layer = layers[step->layer];
      if (layer.value_heads) convolution(layer, 0, step->conv, int64_t{layer.value_heads} * layer.channels, 1.f);
    } else if (const auto* scan = fields_of<ckdist_selective_scan_step>(those, ckdist_step_selective_scan)) {
      Layer& layer = layers[scan->layer];
      layer.kernels[1] = transposed(plan.vectors[scan->a_log], int64_t{layer.value_heads} * layer.channels,
                                    layer.key_width, [](float x) { return -std::exp(x); });
    } else if (const auto* rule = fields_of<ckdist_delta_rule_step>(those, ckdist_step_delta_rule)) {
      Layer& layer = layers[rule->layer];
      if (layer.value_heads == 0) continue;
      const int key_heads = *std::max_element(layer.key_head_of, layer.key_head_of + layer.value_heads) + 1;
      const int64_t keys = int64_t{key_heads} * layer.key_width;
      convolution(layer, 0, rule->conv_q, keys, rule->q_scale);
      convolution(layer, 1, rule->conv_k, keys, rule->k_scale);
      convolution(layer, 2, rule->conv_v, int64_t{layer.value_heads} * layer.value_width, rule->v_scale);
    }
  }
}

void StateSlots::check(const BatchView& batch) const {
  if (slots_ == 0) {
    if (batch.states != nullptr) fail(Status::native, "a batch has state slots, but no layer of the model has a state");
    return;
  }
  if (batch.states == nullptr) fail(Status::native, "a batch has no state slots, but layers of the model have states");
  std::fill(written_.begin(), written_.end(), uint8_t{0});
  const auto write = [&](int32_t slot) {
    if (slot < 0 || slot >= slots_) fail(Status::native, "state slot %d is not one of %lld", slot, (long long)slots_);
    if (written_[slot]++) fail(Status::native, "two sequences of a batch write state slot %d", slot);
  };
  for (int64_t s = 0; s < batch.sequences; s++) {
    const ckdist_state_slots& slots = batch.states[s];
    const BatchView::Chunk& chunk = batch.chunks[s];
    write(slots.out);
    if (slots.save >= 0) {
      write(slots.save);
      if (slots.save_position <= chunk.first_position || slots.save_position > chunk.first_position + chunk.tokens)
        fail(Status::native, "a state cannot be saved at position %d of a chunk of %d tokens from position %d",
             slots.save_position, chunk.tokens, chunk.first_position);
    }
    const int32_t there = slots.in < 0 ? 0 : slots.in < slots_ ? positions_[slots.in] : -1;
    if (there != chunk.first_position)
      fail(Status::native, "a chunk from position %d would continue state slot %d, which holds %d tokens",
           chunk.first_position, slots.in, there);
  }
  for (int64_t s = 0; s < batch.sequences; s++) {
    const ckdist_state_slots& slots = batch.states[s];
    if (slots.in >= 0 && slots.in != slots.out && written_[slots.in])
      fail(Status::native, "a sequence of a batch reads state slot %d, which another sequence writes", slots.in);
  }
}

void StateSlots::accept(const BatchView& batch) {
  check(batch);
  for (int64_t s = 0; s < batch.sequences && batch.states != nullptr; s++) {
    const ckdist_state_slots& slots = batch.states[s];
    positions_[slots.out] = batch.chunks[s].first_position + batch.chunks[s].tokens;
    if (slots.save >= 0) positions_[slots.save] = slots.save_position;
  }
}

}  // namespace ckdist
