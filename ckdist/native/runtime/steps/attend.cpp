// Attention over the KV cache: normalizes and rotates queries and keys, stores keys and values, and attends.
#include "runtime/steps/attention_run.h"
#include "runtime/steps/residual.h"

namespace ckdist {
namespace {

struct Attend : Carved<Attend, AttentionRun<Attend, ckdist_attend_step>> {
  AttentionFields attention() const {
    const int32_t q = step.rotated >= 0 ? step.rotated : step.q;
    AttentionFields of{q, step.out, step.window, step.scale, step.soft_cap, step.sinks};
    of.bidirectional = step.bidirectional != 0, of.relative = step.relative;
    of.listed = step.listed, of.listed_block = step.listed_block, of.listed_window = step.listed_window;
    return of;
  }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return listed_bytes(r, step, step.listed, step.listed_block);
  }

  // Buffers of one thread: the kernel's scratch memory, rotated keys and normed values of a block's positions, the
  // squares of a token's heads.
  struct Room {
    uint8_t* scratch;
    float *key, *value, *squares;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    const int heads = layer.max_heads_per_kv;
    return {c.bytes(r.kernels.attention.scratch_bytes(layer.cache, query_tile(heads), heads)),
            c.floats(kBlockTokens * layer.cache.key_width), c.floats(kBlockTokens * layer.cache.value_width),
            c.floats(step.squares >= 0 ? r.value(step.squares).width : 0)};
  }

  // Factors of a token's queries and keys, without their norm weights, if one RMS norm covers all heads: 1 /
  // sqrt(mean(x^2) + eps).
  void inverse_norms(int64_t token, float* queries, float* keys) {
    const ckdist_layer& a = r.program.layers[step.layer];
    // (total_heads + total_kv_heads,): sums of squares of the token's heads
    const float* const row = step.rotated >= 0 ? r.peer_row(step.squares, token)
                                               : Residual{r, thread, buffers().squares, step.squares}.read(token);
    const auto inverse = [&](const float* squares, int count) {
      float sum = 0.f;
      for (int h = 0; h < count; h++) sum += squares[h];
      return 1.f / std::sqrt(sum / float(count * layer().cache.key_width) + step.eps);
    };
    *queries = inverse(row, a.total_heads);
    *keys = inverse(row + a.total_heads, a.total_kv_heads);
  }

  // One token's heads of one kv-head: inputs, and destinations of the rotated ones.
  struct TokenHeads {
    const float *q, *key, *value;  // (heads_per_kv, key_width), (key_width,), (value_width,)
    float *rotated, *rotated_key;  // (heads_per_kv, key_width), (key_width,)
  };
  TokenHeads heads_of(int64_t token, int kv_head, int slot) {
    const CacheShape& cache = layer().cache;
    const int64_t head = int64_t(layer().first_head[kv_head]) * cache.key_width,
                  key_column = int64_t(kv_head) * cache.key_width, value_column = int64_t(kv_head) * cache.value_width;
    const bool in_place = step.rotated < 0;  // else inputs are in the slot of the token's rank
    if (!in_place && r.rank_of(token) != r.ranks->local_rank)
      r.count_moved(thread, ((layer().heads_per_kv[kv_head] + 1) * cache.key_width + cache.value_width) * 4);
    const float* const q = r.row_of(step.q, token) + head;
    float* const rotated = r.floats(in_place ? step.q : step.rotated).row(token) + head;
    if (!stores()) return {q, nullptr, nullptr, rotated, nullptr};
    return {q, r.row_of(step.k, token) + key_column, r.row_of(step.v, token) + value_column, rotated,
            in_place ? r.floats(step.k).row(token) + key_column : buffers().key + slot * cache.key_width};
  }

  // Keys and values of the batch are stored: the layer has a cache of its own.
  bool stores() const { return step.k >= 0; }

  // out = x / sqrt(mean(x^2) + eps); out may be x.
  void unit_norm(const float* x, int64_t width, float* out) const {
    const float mean = r.kernels.elementwise.sum_squares(x, width) / float(width);
    scaled(x, 1.f / std::sqrt(mean + step.eps), width, out);
  }

  // Norms and rotates a head x to `out`, which may be x. norm: a vector, or negative.
  void norm_and_rotate(const float* x, int norm, const Rope& rope, int width, float* out) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const bool unit = step.unit_norms != 0;
    if (unit && !step.norms_rotated) unit_norm(x, width, out), x = out;
    if (norm >= 0 && !step.norms_rotated) k.rms_norm(x, r.vector(norm), step.eps, width, out), x = out;
    rotate(x, rope, width, out);
    if (unit && step.norms_rotated) unit_norm(out, width, out);
    if (norm >= 0 && step.norms_rotated) k.rms_norm(out, r.vector(norm), step.eps, width, out);
  }

  struct KeyValue {
    const float *key, *value;
  };

  // Norms and rotates one token's queries and key of one kv-head. Returns the key and value to be stored in a slot of a
  // block, if the layer stores them.
  KeyValue rotate_heads(int sequence, int64_t token, int kv_head, int slot) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const Inference::Layer& of = layer();
    const int width = of.cache.key_width;
    const int64_t head = int64_t(of.first_head[kv_head]) * width, key_column = int64_t(kv_head) * width;
    float q_factor = 0.f, k_factor = 0.f;
    const bool together = step.q_norm >= 0 && step.squares >= 0;
    if (together) inverse_norms(token, &q_factor, &k_factor);
    auto [q, key, value, rotated, rotated_key] = heads_of(token, kv_head, slot);
    const int64_t position = r.position_of(sequence, token);
    const Rope rope = rotation(token, position);
    const float scale = query_factor(step.query_beta, step.query_context, position + step.query_from_one);
    for (int h = 0; h < of.heads_per_kv[kv_head]; h++, q += width, rotated += width) {
      const float* x = q;
      if (together)
        k.scale_weighted(x, q_factor, r.vector(step.q_norm) + head + h * width, width, rotated), x = rotated;
      norm_and_rotate(x, together ? -1 : step.q_norm, rope, width, rotated);
      if (step.query_beta != 0.f)
        for (int i = 0; i < width; i++) rotated[i] *= scale;
    }
    if (!stores()) return {};
    if (step.value_norm != 0) {  // before the key, which may be the value and be normed in place
      float* const normed = buffers().value + slot * of.cache.value_width;
      unit_norm(value, of.cache.value_width, normed);
      value = normed;
    }
    if (together)
      k.scale_weighted(key, k_factor, r.vector(step.k_norm) + key_column, width, rotated_key), key = rotated_key;
    norm_and_rotate(key, together ? -1 : step.k_norm, rope, width, rotated_key);
    return {rotated_key, value};
  }

  // Norms and rotates the queries and keys of tokens of one block. Stores keys and values.
  void rotate_and_store(int sequence, int64_t first, int64_t end, int kv_head) {
    const Inference::Layer& of = layer();
    const int64_t position = r.position_of(sequence, first);
    const int slot = int(position % kBlockTokens), count = int(end - first);
    uint8_t* const block = of.kv(kv_head) + block_offset(sequence, position);
    // Prefetches the key half of the block, because storing a key touches each of its cache lines. Later positions of
    // the block find the lines in the cache.
    if (one_token_each() || slot == 0)
      for (int64_t line = 0; line < of.head_bytes / 2; line += 64) __builtin_prefetch(block + line, 1);
    const float *keys[kBlockTokens], *values[kBlockTokens];
    for (int i = 0; i < count; i++) {
      if (!one_token_each()) fetch_token(std::min(first + i + kTokensAhead, r.batch.tokens - 1), kv_head);
      const KeyValue rows = rotate_heads(sequence, first + i, kv_head, slot + i);
      keys[i] = rows.key, values[i] = rows.value;
    }
    if (!stores()) return;
    if (count == kBlockTokens) return r.kernels.attention.store_block(of.cache, block, keys, values);
    for (int i = 0; i < count; i++) r.kernels.attention.store(of.cache, block, slot + i, keys[i], values[i]);
  }

  // Prefetches the rows that rotate_heads() reads. Tokens' rows are pages apart, so the hardware does not prefetch
  // them.
  void fetch_token(int64_t token, int kv_head) {
    const Inference::Layer& layer = this->layer();
    for (const int32_t of : {step.q, step.k, step.v}) {
      if (of < 0) continue;
      const int64_t width = of == step.v ? layer.cache.value_width : layer.cache.key_width;
      const float* const at = r.row_of(of, token) + (of == step.q ? layer.first_head[kv_head] : kv_head) * width;
      fetch_floats(at, (of == step.q ? layer.heads_per_kv[kv_head] : 1) * width);
    }
  }

  void run() {
    const int kv_heads = layer().kv_heads;
    if (!one_token_each() || step.listed >= 0) return attend_prompt();
    if (kv_heads > 0) {
      const Split split = split_of();
      if (split.spans_each > 0) return attend_split(split);
    }
    // One token per sequence: the thread that stores a kv-head's key also attends to it. So no barrier is needed.
    const int64_t items = r.batch.sequences * kv_heads;
    const auto attend_one = [&](int64_t item, int64_t next) {
      const int sequence = int(item / kv_heads), kv_head = int(item % kv_heads);
      rotate_and_store(sequence, sequence, sequence + 1, kv_head);
      AttentionTask task = task_of({sequence, 0, 1, kv_head});
      if (next < items) read_next(task, int(next / kv_heads), int(next % kv_heads));
      r.kernels.attention.attend(task, r.memory(thread));
    };
    if (r.batch.sequences == 1 && kv_heads % r.active() == 0) {  // even division: the next item is known
      const int64_t each = kv_heads / r.active(), end = (thread + 1) * each;
      for (int64_t i = thread * each; i < end; i++) attend_one(i, i + 1 < end ? i + 1 : items);
    } else {  // the threads of a group usually take items in turn
      r.take_items(thread, index, items, [&](int64_t i) { attend_one(i, i + r.active() / r.groups()); });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  // Makes the task prefetch the keys and values of the next item at its end.
  void read_next(AttentionTask& task, int sequence, int kv_head) const {
    const AttentionTask next = placed(sequence, 0, 1);
    const int64_t first = next.first_span() * (kSpan / kBlockTokens);
    task.next_kv = layer().kv(kv_head);
    task.next_table = r.table_of(sequence) + first;
    task.next_blocks = (next.end() + kBlockTokens - 1) / kBlockTokens - first;
  }

  void attend_split(const Split& split) {
    const int kv_heads = layer().kv_heads;
    clear_parts();
    for (int64_t i = thread; i < r.batch.sequences * kv_heads; i += r.active())
      rotate_and_store(int(i / kv_heads), i / kv_heads, i / kv_heads + 1, int(i % kv_heads));
    r.meet(thread, index);
    attend_parts(split);
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend_prompt() {
    each_stored_block(layer().kv_heads, [&](int sequence, int64_t first, int64_t end, int kv_head) {
      rotate_and_store(sequence, first, end, kv_head);
    });
    r.meet(thread, index);
    if (step.listed >= 0) attend_listed();
    else attend_tiles();
    r.finish(thread, index, step.out, r.batch.tokens);
  }
};

const RegisteredKind<Attend> kAttend(ckdist_step_attend);

}  // namespace
}  // namespace ckdist
