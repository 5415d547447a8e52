#include <algorithm>
#include <cmath>

#include "runtime/executable.h"

// Steps of an executable: attention over the cache.

namespace ckdist {

// The rotation of a head at a position; what of the head is not rotated stays.
void Executable::rotate(const ckdist_step& step, const float* x, int64_t position, int64_t width, float* out) const {
  const int table = step.i[1];
  const int64_t dims = table < 0 ? 0 : program_.ropes[table].dims;
  if (dims > 0) {
    const ckdist_rope& rope = program_.ropes[table];
    const ElementwiseKernel& k = kernels_.elementwise;
    (rope.interleaved ? k.rope_pairs : k.rope)(x, rope.cos + position * (dims / 2), rope.sin + position * (dims / 2),
                                               dims, out);
  }
  if (out != x && dims < width) std::copy(x + dims, x + width, out + dims);
}

// Sums of squares of every head, for norms over all heads of a token.
void Executable::squares(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const ckdist_layer_attention& a = program_.attention[step.i[0]];
  const Layer& layer = layer_of(step);
  const int64_t width = layer.cache.key_width, group = a.total_heads / a.total_kv_heads;
  int64_t q_stride, k_stride, stride;
  const float* const q = floats(step.x, &q_stride);
  const float* const k = floats(step.y, &k_stride);
  float* const out = floats(step.out[0], &stride);
  const bool all = phase_->tokens_cut;  // of own tokens every head is here
  const int64_t first = all ? 0 : a.first_head, heads = all ? a.total_heads : layer.heads();
  const Range own = rows_of(thread, own_tokens_);
  for (int64_t t = own.begin; t < own.end; t++) {
    float* const row = out + t * stride;
    std::fill(row, row + a.total_heads + a.total_kv_heads, 0.f);
    for (int64_t h = 0; h < heads; h++)
      row[first + h] = kernels_.elementwise.sum_squares(q + t * q_stride + h * width, width);
    // A kv-head that ranks share is counted by the one that has the first of its query heads.
    const int64_t first_kv = first / group, last_kv = heads ? (first + heads - 1) / group + 1 : first_kv;
    for (int64_t h = first_kv; h < last_kv; h++)
      if (h * group >= first)
        row[a.total_heads + h] =
            kernels_.elementwise.sum_squares(k + t * k_stride + (all ? a.key_places[h] : h - first_kv) * width, width);
  }
  finish(thread, index, own_tokens_);
}

// What queries and keys of a token are multiplied by, beside their weights, where all heads are normed together.
void Executable::inverse_norms(int thread, const ckdist_step& step, int64_t token, float* queries, float* keys) {
  const ckdist_layer_attention& a = program_.attention[step.i[0]];
  const ckdist_value& v = value(step.y);
  const float* row;
  if (step.x >= 0) {
    row = peer_row(step.y, token);
  } else {
    const float* parts[kMaxRanks];
    int64_t stride;
    int count = 1;
    if (v.kind == ckdist_in_slot) count = ranks_->summands(int(v.place), parts);
    else parts[0] = floats(step.y, &stride);
    for (int p = 0; p < count; p++) parts[p] += token * v.width;
    row = parts[0];
    if (count > 1)
      kernels_.elementwise.sum_parts(nullptr, parts, count, v.width, workers_[thread].row), row = workers_[thread].row;
  }
  const auto inverse = [&](const float* squares, int count) {
    float sum = 0.f;
    for (int h = 0; h < count; h++) sum += squares[h];
    return 1.f / std::sqrt(sum / float(count * layer_of(step).cache.key_width) + step.f[0]);
  };
  *queries = inverse(row, a.total_heads);
  *keys = inverse(row + a.total_heads, a.total_kv_heads);
}

// Rotates one token's queries and key of one kv-head (norms first, where the model has them) and stores key and value.
void Executable::rotate_and_store(int thread, const ckdist_step& step, int run, int64_t token, int kv_head) {
  const ElementwiseKernel& k = kernels_.elementwise;
  const Layer& layer = layer_of(step);
  const int key_width = layer.cache.key_width, value_width = layer.cache.value_width;
  const int64_t head = int64_t(layer.first_head[kv_head]) * key_width, key_column = int64_t(kv_head) * key_width;
  const int64_t value_column = int64_t(kv_head) * value_width;
  int64_t stride, blocks = 0, first = 0;
  const float *q, *key, *value;
  float *rotated, *rotated_key;
  float q_factor = 0.f, k_factor = 0.f;
  const bool together = step.vector[0] >= 0 && step.y >= 0;
  if (together) inverse_norms(thread, step, token, &q_factor, &k_factor);
  if (step.x >= 0) {  // as the token's rank wrote them
    rotated = floats(step.x, &stride) + token * stride + head;
    rotated_key = workers_[thread].row;
    q = peer_row(step.out[0], token) + head, key = peer_row(step.out[1], token) + key_column,
    value = peer_row(step.out[2], token) + value_column;
    if (owner(token) != ranks_->local_rank)
      workers_[thread].moved += ((layer.heads_per_kv[kv_head] + 1) * key_width + value_width) * 4;
  } else {
    q = rotated = floats(step.out[0], &stride) + token * stride + head;
    key = rotated_key = floats(step.out[1], &stride) + token * stride + key_column;
    value = floats(step.out[2], &stride) + token * stride + value_column;
  }
  for (int r = 0; r < run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const int64_t position = batch_.run[run].first_position + token - first;
  uint8_t* const block = layer.kv(kv_head) + batch_.block_tables[blocks + position / kBlockTokens] * layer.block_bytes;
  // A key has a place in each line of its half: they come while it is rotated. Later positions of the block find them.
  if (batch_.tokens == batch_.runs || position % kBlockTokens == 0)
    for (int64_t line = 0; line < layer.head_bytes / 2; line += 64) __builtin_prefetch(block + line, 1);
  for (int h = 0; h < layer.heads_per_kv[kv_head]; h++, q += key_width, rotated += key_width) {
    const float* x = q;
    if (together) {
      k.scale_weighted(x, q_factor, vector(step.vector[0]) + head + h * key_width, key_width, rotated), x = rotated;
    } else if (step.vector[0] >= 0) {
      k.rms_norm(x, vector(step.vector[0]), step.f[0], key_width, rotated), x = rotated;
    }
    rotate(step, x, position, key_width, rotated);
  }
  if (together) {
    k.scale_weighted(key, k_factor, vector(step.vector[1]) + key_column, key_width, rotated_key), key = rotated_key;
  } else if (step.vector[1] >= 0) {
    k.rms_norm(key, vector(step.vector[1]), step.f[0], key_width, rotated_key), key = rotated_key;
  }
  rotate(step, key, position, key_width, rotated_key);
  kernels_.attention.store(layer.cache, block, int(position % kBlockTokens), rotated_key, value);
}

// Asks for what rotate_and_store() reads: tokens' rows are pages apart, so no hardware brings them.
void Executable::fetch_token(const ckdist_step& step, int64_t token, int kv_head) {
  const Layer& layer = layer_of(step);
  for (int m = 0; m < 3; m++) {
    const int64_t width = m == 2 ? layer.cache.value_width : layer.cache.key_width;
    int64_t stride;
    const float* at = step.x >= 0 ? peer_row(step.out[m], token) : floats(step.out[m], &stride) + token * stride;
    at += (m == 0 ? layer.first_head[kv_head] : kv_head) * width;
    const int64_t n = (m == 0 ? layer.heads_per_kv[kv_head] : 1) * width;
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
  }
}

AttentionTask Executable::task_of(const ckdist_step& step, const Item& item) {
  int64_t first = 0, blocks = 0, q_stride, out_stride;
  for (int r = 0; r < item.run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const Layer& layer = layer_of(step);
  const CacheShape& cache = layer.cache;
  const int64_t head = layer.first_head[item.kv_head];
  const float* q = floats(step.x >= 0 ? step.x : step.out[0], &q_stride);
  float* out = floats(step.out[3], &out_stride);
  AttentionTask task{};
  task.key_type = cache.key_type, task.value_type = cache.value_type;
  task.key_width = cache.key_width, task.value_width = cache.value_width;
  task.kv = layer.kv(item.kv_head);
  task.block_stride = layer.block_bytes;
  task.block_table = batch_.block_tables + blocks;
  task.first_position = batch_.run[item.run].first_position + item.first;
  task.tokens = item.tokens;
  task.heads = layer.heads_per_kv[item.kv_head];
  task.q = q + (first + item.first) * q_stride + head * cache.key_width;
  task.q_token_stride = q_stride;
  task.q_head_stride = cache.key_width;
  task.out = out + (first + item.first) * out_stride + head * cache.value_width;
  task.out_token_stride = out_stride;
  task.out_head_stride = cache.value_width;
  task.scale = step.f[1];
  task.soft_cap = step.f[2];
  task.window = step.i[2];
  return task;
}

// Cutting costs a barrier. It pays where whole (run, kv-head) items cannot be handed out evenly: where the longest is a
// large share of what each thread should do.
Executable::Split Executable::split_of(const ckdist_step& step) {
  Split split;
  int64_t longest = 0;
  for (int r = 0; r < batch_.runs; r++) {
    AttentionTask task{};
    task.first_position = batch_.run[r].first_position, task.tokens = 1, task.window = step.i[2];
    const int64_t spans = task.last_span() - task.first_span();
    split.spans += spans, longest = std::max(longest, spans);
  }
  const int kv_heads = layer_of(step).kv_heads;
  const int64_t total = split.spans * kv_heads;
  const bool even = batch_.runs == 1 && kv_heads % active_ == 0;
  if (even || longest < 4 || longest * active_ * 4 <= total || total > part_count_) return split;
  split.spans_each = std::max<int64_t>(total / (active_ * 8), 1);
  return split;
}

void Executable::attend(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int kv_heads = layer_of(step).kv_heads;
  if (batch_.tokens != batch_.runs) return attend_prompt(thread, index);
  if (active_ > 1 && kv_heads > 0) {
    const Split split = split_of(step);
    if (split.spans_each > 0) return attend_split(thread, index, split);
  }
  // One token per sequence: whoever stores a kv-head's key also attends to it, so no barrier stands between.
  const auto attend_one = [&](int run, int kv_head, bool next) {
    rotate_and_store(thread, step, run, run, kv_head);
    AttentionTask task = task_of(step, {run, 0, 1, kv_head});
    if (next) task.next_kv = layer_of(step).kv(kv_head + 1);
    kernels_.attention.attend(task, workers_[thread].scratch);
  };
  if (batch_.runs == 1 && kv_heads % active_ == 0) {  // even shares are known ahead
    const int each = kv_heads / active_;
    for (int h = 0; h < each; h++) attend_one(0, thread * each + h, h + 1 < each);
  } else {
    for (int64_t i; (i = counters_[index].fetch_add(1)) < batch_.runs * kv_heads;)
      attend_one(int(i / kv_heads), int(i % kv_heads), false);
  }
  finish(thread, index, batch_.tokens);
}

void Executable::attend_split(int thread, int index, const Split& split) {
  const ckdist_step& step = phase_->steps[index];
  const int kv_heads = layer_of(step).kv_heads;
  for (int64_t i = thread; i < batch_.runs * kv_heads; i += active_)
    rotate_and_store(thread, step, int(i / kv_heads), i / kv_heads, int(i % kv_heads));
  meet(thread, index);
  int64_t i = counters_[index].fetch_add(1), before = 0, parts = 0;  // before: tasks of earlier items; parts: theirs
  for (int64_t item = 0; item < batch_.runs * kv_heads; item++) {
    const int run = int(item / kv_heads), kv_head = int(item % kv_heads);
    const AttentionTask task = task_of(step, {run, 0, 1, kv_head});
    const int64_t spans = task.last_span() - task.first_span(),
                  tasks = (spans + split.spans_each - 1) / split.spans_each;
    uint8_t* at = part_arena_->data() + parts * part_bytes_;
    for (; i < before + tasks; i = counters_[index].fetch_add(1)) {
      const int64_t from = (i - before) * split.spans_each, to = std::min(from + split.spans_each, spans);
      const int64_t bytes = kernels_.attention.part_bytes(task.cache(), 1, task.heads);
      kernels_.attention.attend_spans(task, task.first_span() + from, task.first_span() + to, at + from * bytes,
                                      workers_[thread].scratch);
      std::atomic<int64_t>& merged = merged_[item];
      if (merged.fetch_add(to - from, std::memory_order_acq_rel) + to - from < spans) continue;
      merged.store(0, std::memory_order_relaxed);
      kernels_.attention.merge(task, at, workers_[thread].scratch);
    }
    before += tasks, parts += spans;
  }
  finish(thread, index, batch_.tokens);
}

void Executable::attend_prompt(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int kv_heads = layer_of(step).kv_heads;
  int64_t blocks = 0, tiles = 0;
  for (int64_t r = 0; r < batch_.runs; r++) {
    const BatchView::Run& run = batch_.run[r];
    blocks += (run.first_position + run.tokens - 1) / kBlockTokens - run.first_position / kBlockTokens + 1;
    tiles += (run.tokens + kQueryTile - 1) / kQueryTile;
  }
  // Heads, or parts of a head's tokens, are cut over the threads alike for both halves. A block's positions are stored
  // by one thread: they share its cache lines.
  const Range own = {kv_heads * blocks * thread / active_, kv_heads * blocks * (thread + 1) / active_};
  for (int64_t run = 0, block = 0, first = 0, end = 0; run < batch_.runs; run++) {
    end += batch_.run[run].tokens;
    for (int64_t position = batch_.run[run].first_position, next; first < end; first = next, block++) {
      next = std::min(first + kBlockTokens - position % kBlockTokens, end);
      position += next - first;
      for (int h = 0; h < kv_heads; h++) {
        if (h * blocks + block < own.begin || h * blocks + block >= own.end) continue;
        for (int64_t token = first; token < next; token++) {
          fetch_token(step, std::min(token + kTokensAhead, batch_.tokens - 1), h);
          rotate_and_store(thread, step, int(run), token, h);
        }
      }
    }
  }
  meet(thread, index);
  // A head's keys and values stay in a thread's caches from tile to tile of query tokens, from the last, longest
  // context to the first.
  share_out(thread, index, tiles * kv_heads, [&](int64_t i) {
    int64_t tile = tiles - 1 - i % tiles;
    int run = 0;
    for (int64_t n; tile >= (n = (batch_.run[run].tokens + kQueryTile - 1) / kQueryTile); run++) tile -= n;
    const int first = int(tile) * kQueryTile;
    const Item item = {run, first, std::min(kQueryTile, batch_.run[run].tokens - first), int(i / tiles)};
    kernels_.attention.attend(task_of(step, item), workers_[thread].scratch);
  });
  finish(thread, index, batch_.tokens);
}

}  // namespace ckdist
