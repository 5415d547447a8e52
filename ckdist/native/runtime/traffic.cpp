#include "runtime/traffic.h"

#include <algorithm>

#include "runtime/inference.h"

namespace ckdist {

void Traffic::read_plan(const Inference& inference) {
  const ckdist_step_list& list = inference.plan->lists[0];
  for (int i = 0; i < list.count; i++) {
    const ckdist_step* const step = list.steps[i];
    if (step->kind == ckdist_step_linear) {
      const auto& linear = reinterpret_cast<const ckdist_linear_step&>(*step);
      for (const ckdist_product* p = linear.products; p != linear.products + linear.count; p++) {
        add_matrices(inference, p->weight);
        add_matrices(inference, p->low_weight);
      }
    } else if (step->kind == ckdist_step_linear_heads) {
      add_matrices(inference, reinterpret_cast<const ckdist_linear_heads_step&>(*step).weight);
    } else if (step->kind == ckdist_step_attend) {
      const auto& attend = reinterpret_cast<const ckdist_attend_step&>(*step);
      const int64_t heads = std::max(inference.layers[attend.layer].kv_heads, 1), block = attend.listed_block;
      const int64_t listed = attend.listed < 0 ? 0 : inference.value(attend.listed).width;
      add_cache(inference, attend.layer, attend.listed < 0 ? attend.window : block ? listed / heads * block : listed);
    } else if (step->kind == ckdist_step_attend_latent) {
      const auto& attend = reinterpret_cast<const ckdist_attend_latent_step&>(*step);
      add_cache(inference, attend.layer, attend.listed < 0 ? 0 : inference.value(attend.listed).width);
    } else if (step->kind == ckdist_step_select_positions) {
      const auto& layer = inference.layers[reinterpret_cast<const ckdist_select_positions_step&>(*step).layer];
      add_bytes(layer.block_bytes - layer.index_offset, 0);
    } else if (step->kind == ckdist_step_select_blocks) {
      const auto& layer = inference.layers[reinterpret_cast<const ckdist_select_blocks_step&>(*step).layer];
      add_bytes(layer.block_bytes - layer.index_offset, 0);
    } else if (step->kind == ckdist_step_attend_cross) {
      add_cache(inference, reinterpret_cast<const ckdist_attend_cross_step&>(*step).layer, kCross);
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
