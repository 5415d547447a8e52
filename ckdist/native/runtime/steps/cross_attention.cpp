// Cross-attention over the cache: stores keys and values of an encoder's output, and attends to all of them.
#include "runtime/steps/attention_run.h"

namespace ckdist {
namespace {

struct StoreCross : LayerRun<ckdist_store_cross_step> {
  void run() {
    const Inference::Layer& of = layer();
    each_stored(of.kv_heads, [&](int sequence, int64_t token, int kv_head) {
      const int64_t position = r.position_of(sequence, token);
      // k: (tokens, kv_heads, key_width), v: (tokens, kv_heads, value_width)
      const float* const k = r.floats(step.k).row(token) + int64_t{kv_head} * of.cache.key_width;
      const float* const v = r.floats(step.v).row(token) + int64_t{kv_head} * of.cache.value_width;
      r.kernels.attention.store(of.cache, of.kv(kv_head) + block_offset(sequence, position),
                                int(position % kBlockTokens), k, v);
    });
    r.count_step(thread);
    r.meet(thread, index);
  }
};

struct AttendCross : AttentionRun<AttendCross, ckdist_attend_cross_step> {
  AttentionFields attention() const { return {step.q, step.out, 0, step.scale, 0.f, -1, false, true}; }
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    return r.kernels.attention.scratch_bytes(layer.cache, query_tile(layer.max_heads_per_kv), layer.max_heads_per_kv);
  }

  void run() {
    if (layer().kv_heads > 0) attend();
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend() {
    if (!one_token_each()) return attend_tiles();
    const Split split = split_of();
    if (split.spans_each > 0) {
      clear_parts();
      r.meet(thread, index);
    }
    attend_single(split);
  }
};

const RegisteredKind<StoreCross> kStoreCross(ckdist_step_store_cross);
const RegisteredKind<AttendCross> kAttendCross(ckdist_step_attend_cross);

}  // namespace
}  // namespace ckdist
