// Latent attention over the cache: normalizes and rotates a token's cached vector, rotates the queries, and attends.
//
// All heads read the same cached vectors. So a rank's heads are divided into groups, which take the place of kv-heads
// in `attend`: a thread attends for one group at a time and reads vectors from caches that threads share.
#include "runtime/steps/attention_run.h"

namespace ckdist {
namespace {

struct AttendLatent : Carved<AttendLatent, AttentionRun<AttendLatent, ckdist_attend_latent_step>> {
  AttentionFields attention() const {
    AttentionFields of{step.q, step.out, step.window, step.scale, 0.f, step.sinks};
    of.listed = step.listed, of.listed_window = step.listed_window;
    return of;
  }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) { return listed_bytes(r, step, step.listed); }

  // Buffers of one thread: the kernel's scratch memory and a key.
  struct Room {
    uint8_t* scratch;
    float* key;  // (key_width,): latent values, then the rotated part
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    return {c.bytes(r.kernels.attention.scratch_bytes(layer.cache, kLatentTile, layer.max_heads_per_kv)),
            c.floats(layer.cache.key_width)};
  }

  void run() {
    if (layer().kv_heads > 0) attend();
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend() {
    const bool single = one_token_each();
    const Split split = single && step.listed < 0 ? split_of() : Split{};
    if (split.spans_each > 0) clear_parts();
    each_stored(1, [&](int sequence, int64_t token, int) { store_key(sequence, token); });
    rotate_queries();
    r.meet(thread, index);
    if (step.listed >= 0) return attend_listed();
    single ? attend_single(split) : attend_tiles();
  }

  void store_key(int sequence, int64_t token) {
    float* const key = buffers().key;
    const Inference::Layer& of = layer();
    const int width = of.cache.key_width, latent = of.cache.value_width;
    const int64_t position = r.position_of(sequence, token);
    uint8_t* const block = of.kv(0) + block_offset(sequence, position);
    const float* const x = r.row_of(step.k, token);
    if (r.value(step.k).place == ckdist_place_tokens && r.rank_of(token) != r.ranks->local_rank)
      r.count_moved(thread, width * 4);
    fetch_floats(r.row_of(step.k, std::min(token + kTokensAhead, r.batch.tokens - 1)), width);
    // Storing a key touches each cache line of the block. Later positions of the block find the lines in the cache.
    for (int64_t line = 0; position % kBlockTokens == 0 && line < of.block_bytes; line += 64)
      __builtin_prefetch(block + line, 1);
    if (step.norm >= 0) r.kernels.elementwise.rms_norm(x, r.vector(step.norm), step.eps, latent, key);
    else std::copy(x, x + latent, key);
    if (step.key_norm >= 0)
      r.kernels.elementwise.rms_norm(x + latent, r.vector(step.key_norm), step.eps, width - latent, key + latent);
    else std::copy(x + latent, x + width, key + latent);
    rotate(key, rotation(token, position), width, key, latent);
    r.kernels.attention.store(of.cache, block, int(position % kBlockTokens), key, nullptr);
  }

  // Each thread rotates an equal part of all tokens' heads.
  void rotate_queries() {
    const FloatRows q = r.floats(step.q);  // (tokens, heads, key_width)
    const int64_t heads = layer().heads(), width = layer().cache.key_width;
    const Range own = r.part_of(thread, r.batch.tokens * heads);
    for (int64_t token = own.begin / heads; token * heads < own.end; token++) {
      const int64_t position = r.token_of(token).position;
      const Rope rope = rotation(token, position);
      const float scale = query_factor(step.query_beta, step.query_context, position + step.query_from_one);
      const int64_t end = std::min(own.end - token * heads, heads);
      for (int64_t h = std::max<int64_t>(own.begin - token * heads, 0); h < end; h++) {
        float* const head = q.row(token) + h * width;
        rotate(head, rope, width, head, layer().cache.value_width);
        if (step.query_beta != 0.f)
          for (int64_t i = 0; i < width; i++) head[i] *= scale;
      }
    }
  }
};

const RegisteredKind<AttendLatent> kAttendLatent(ckdist_step_attend_latent);

}  // namespace
}  // namespace ckdist
