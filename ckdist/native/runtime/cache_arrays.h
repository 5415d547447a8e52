// The arrays of one layer's cache on this rank, and their bytes in a block and in a slot.
//
// A block has, for each kv-head, its keys and values together (kernels/isa/attention_block.h). Latent vectors and their
// rotated keys are the keys of one head. The index comes next; its keys are like those of one latent head. Plain rows
// come last, in the order of their names. A slot has, for each head, its state and then its convolution's inputs, or
// the rings of a layer with compressed entries, in the order of their names.
#pragma once
#include <cstdint>
#include <optional>

#include "api/program_api.h"
#include "kernels/attention.h"

namespace ckdist {

struct CacheArrays {
  const ckdist_cache_array* const arrays;
  const int count;

  CacheArrays(const ckdist_cache_array* arrays, int count) : arrays(arrays), count(count) {}
  explicit CacheArrays(const ckdist_layer& layer) : CacheArrays(layer.arrays, layer.array_count) {}

  const ckdist_cache_array* find(ckdist_array name) const;  // null: the layer does not have it
  const ckdist_cache_array& at(ckdist_array name) const;    // throws if the layer does not have it
  std::optional<CacheShape> shape() const;        // of one head in a block; empty if the layer has nothing in blocks
  std::optional<CacheShape> index() const;        // of the index in a block; empty if the layer has none
  int64_t index_offset() const;                   // bytes of a block before the index
  int64_t plain_offset(ckdist_array name) const;  // bytes of a block before an array of plain rows
  int64_t block_bytes() const;
  // Floats of one head in a slot: its state (see kernels/delta_rule.h), and all.
  int64_t state_floats() const;
  int64_t head_floats() const;
  int64_t ring_offset(ckdist_array name) const;  // floats of a slot before a ring
  int64_t slot_bytes() const;
};

// Bytes from one block of a cache to the next, if a block of all layers has `bytes`. Never near a multiple of 64 KiB:
// then the blocks of a layer would share few sets of a core's cache.
int64_t block_stride(int64_t bytes);

}  // namespace ckdist
