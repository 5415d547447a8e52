#include "runtime/traffic.h"

#include "runtime/inference.h"

namespace ckdist {

void Traffic::read_plan(const Inference& inference) {
  const ckdist_step_list& list = inference.plan->lists[0];
  const auto index_bytes = [](const Inference::Layer& layer) { return layer.block_bytes - layer.index_offset; };
  for (int i = 0; i < list.count; i++) {
    const ckdist_step* const step = list.steps[i];
    if (const auto* linear = fields_of<ckdist_linear_step>(step, ckdist_step_linear)) {
      for (const ckdist_product* p = linear->products; p != linear->products + linear->count; p++) {
        add_matrices(inference, p->weight);
        add_matrices(inference, p->low_weight);
      }
    } else if (const auto* heads = fields_of<ckdist_linear_heads_step>(step, ckdist_step_linear_heads)) {
      add_matrices(inference, heads->weight);
    } else if (const auto* attend = fields_of<ckdist_attend_step>(step, ckdist_step_attend)) {
      const int64_t groups = std::max(inference.layers[attend->layer].kv_heads, 1), block = attend->listed_block;
      const int64_t listed = attend->listed < 0 ? 0 : inference.value(attend->listed).width;
      add_cache(inference, attend->layer,
                attend->listed < 0 ? attend->window
                : block            ? listed / groups * block
                                   : listed);
    } else if (const auto* latent = fields_of<ckdist_attend_latent_step>(step, ckdist_step_attend_latent)) {
      add_cache(inference, latent->layer, latent->listed < 0 ? 0 : inference.value(latent->listed).width);
    } else if (const auto* positions = fields_of<ckdist_select_positions_step>(step, ckdist_step_select_positions)) {
      add_bytes(index_bytes(inference.layers[positions->layer]), 0);
    } else if (const auto* blocks = fields_of<ckdist_select_blocks_step>(step, ckdist_step_select_blocks)) {
      add_bytes(index_bytes(inference.layers[blocks->layer]), 0);
    } else if (const auto* cross = fields_of<ckdist_attend_cross_step>(step, ckdist_step_attend_cross)) {
      add_cache(inference, cross->layer, kCross);
    }
  }
}

void Traffic::add_matrices(const Inference& inference, ckdist_span span) {
  for (int m = span.first; m < span.first + span.count; m++)
    weights_ += inference.matrix(m).tile_count() * inference.matrix(m).tile_bytes;
}

void Traffic::add_cache(const Inference& inference, int layer, int64_t window) {
  add_bytes(inference.layers[layer].index_offset, window);
}

void Traffic::add_bytes(int64_t block_bytes, int64_t window) {
  const int64_t bytes = block_bytes / ckdist_block_tokens;
  const auto known = std::find_if(caches_.begin(), caches_.end(), [=](const Cache& c) { return c.window == window; });
  if (known != caches_.end()) known->bytes += bytes;
  else caches_.push_back({window, bytes});
}

int64_t Traffic::bytes(const BatchView& batch) const {
  int64_t total = weights_;
  for (const Cache& cache : caches_)
    for (int64_t s = 0; s < batch.sequences; s++) {
      const int64_t positions = cache.window == kCross ? batch.firsts[s] : int64_t{batch.chunks[s].first_position} + 1;
      const int64_t seen = cache.window > 0 || cache.window == kCross ? std::min(cache.window, positions)
                           : cache.window < 0                         ? (positions - 1) % -cache.window + 1
                                                                      : positions;
      total += cache.bytes * seen;
    }
  return total;
}

}  // namespace ckdist
