// Cross-attention over the cache: stores keys and values of an encoder's output, and attends to all of them.
#include "runtime/steps/attention_run.h"

namespace ckdist {
namespace {

struct StoreCross : AttentionRun<StoreCross, ckdist_store_cross_step> {
  AttentionFields attention() const { return {step.layer, step.k, step.v, 0, 0.f, 0.f, nullptr}; }

  void run() {
    const Inference::Layer& of = layer();
    this->each_stored(of.kv_heads, [&](int sequence, int64_t token, int kv_head) {
      const typename AttentionRun::Start start = this->start_of(sequence);
      const int64_t position = r.batch.chunks[sequence].first_position + token - start.token;
      const int32_t block = r.batch.block_tables[start.block + position / kBlockTokens];
      // k: (tokens, kv_heads, key_width), v: (tokens, kv_heads, value_width)
      int64_t k_stride, v_stride;
      const float* const k = r.floats(step.k, &k_stride) + token * k_stride + int64_t{kv_head} * of.cache.key_width;
      const float* const v = r.floats(step.v, &v_stride) + token * v_stride + int64_t{kv_head} * of.cache.value_width;
      r.kernels.attention.store(of.cache, of.kv(kv_head) + block * of.block_stride, int(position % kBlockTokens), k, v);
    });
    r.count_step(thread);
    r.meet(thread, index);
  }
};

struct AttendCross : AttentionRun<AttendCross, ckdist_attend_cross_step> {
  AttentionFields attention() const { return {step.layer, step.q, step.out, 0, step.scale, 0.f, nullptr, false, true}; }
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    return r.kernels.attention.scratch_bytes(layer.cache, kQueryTile, layer.max_heads_per_kv);
  }

  void run() {
    if (layer().kv_heads > 0) attend();
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend() {
    if (r.batch.tokens != r.batch.sequences) return attend_tiles();
    if (const Split split = r.active() > 1 ? split_of() : Split{}; split.spans_each > 0) {
      clear_parts();
      r.meet(thread, index);
      return attend_parts(split);
    }
    const int kv_heads = layer().kv_heads;
    r.take_items(thread, index, r.batch.sequences * kv_heads, [&](int64_t i) {
      r.kernels.attention.attend(task_of({int(i / kv_heads), 0, 1, int(i % kv_heads)}), r.memory(thread));
    });
  }
};

const RegisteredKind<StoreCross> kStore(ckdist_step_store_cross);
const RegisteredKind<AttendCross> kAttend(ckdist_step_attend_cross);

}  // namespace
}  // namespace ckdist
