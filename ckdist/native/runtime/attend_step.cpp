#include <algorithm>

#include "runtime/executable.h"

// Steps of an executable: attention over the cache.

namespace ckdist {

// Rotates one token's queries and key of one kv-head (norms first, where the model has them) and stores key and value.
void Executable::rotate_and_store(int thread, const ckdist_step& step, int run, int64_t token, int kv_head) {
  const ElementwiseKernel& k = kernels_.elementwise;
  const int head_dim = program_.head_dim;
  const int64_t head = int64_t(first_head_[kv_head]) * head_dim, kv_column = int64_t(kv_head) * head_dim;
  int64_t stride, blocks = 0, first = 0;
  const float *q, *key, *value;
  float *rotated, *rotated_key;
  if (step.x >= 0) {  // as the token's rank wrote them
    rotated = floats(step.x, &stride) + token * stride + head;
    rotated_key = workers_[thread].row;
    q = peer_row(step.out[0], token) + head, key = peer_row(step.out[1], token) + kv_column,
    value = peer_row(step.out[2], token) + kv_column;
    if (owner(token) != ranks_->local_rank)
      workers_[thread].moved += (program_.heads_per_kv[kv_head] + 2) * head_dim * 4;
  } else {
    q = rotated = floats(step.out[0], &stride) + token * stride + head;
    key = rotated_key = floats(step.out[1], &stride) + token * stride + kv_column;
    value = floats(step.out[2], &stride) + token * stride + kv_column;
  }
  for (int r = 0; r < run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const int64_t position = batch_.run[run].first_position + token - first;
  uint8_t* const block =
      kv(step.i[0], kv_head) + batch_.block_tables[blocks + position / kBlockTokens] * kv_block_bytes_;
  // A key has a place in each line of its half: they come while it is rotated. Later positions of the block find them.
  if (batch_.tokens == batch_.runs || position % kBlockTokens == 0)
    for (int64_t line = 0; line < kv_head_bytes_ / 2; line += 64) __builtin_prefetch(block + line, 1);
  const float* cos = program_.rope_cos[step.i[1]] + position * (head_dim / 2);
  const float* sin = program_.rope_sin[step.i[1]] + position * (head_dim / 2);
  for (int h = 0; h < program_.heads_per_kv[kv_head]; h++, q += head_dim, rotated += head_dim) {
    const float* x = q;
    if (step.vector[0] >= 0) k.rms_norm(x, vector(step.vector[0]), step.f[0], head_dim, rotated), x = rotated;
    k.rope(x, cos, sin, head_dim, rotated);
  }
  if (step.vector[1] >= 0) k.rms_norm(key, vector(step.vector[1]), step.f[0], head_dim, rotated_key), key = rotated_key;
  k.rope(key, cos, sin, head_dim, rotated_key);
  kernels_.attention.store(KvType(program_.kv_type), block, int(position % kBlockTokens), head_dim, rotated_key, value);
}

// Asks for what rotate_and_store() reads: tokens' rows are pages apart, so no hardware brings them.
void Executable::fetch_token(const ckdist_step& step, int64_t token, int kv_head) {
  const int head_dim = program_.head_dim;
  for (int m = 0; m < 3; m++) {
    int64_t stride;
    const float* at = step.x >= 0 ? peer_row(step.out[m], token) : floats(step.out[m], &stride) + token * stride;
    at += int64_t(m == 0 ? first_head_[kv_head] : kv_head) * head_dim;
    const int64_t n = (m == 0 ? program_.heads_per_kv[kv_head] : 1) * int64_t(head_dim);
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
  }
}

AttentionTask Executable::task_of(const ckdist_step& step, const Item& item) {
  int64_t first = 0, blocks = 0, q_stride, out_stride;
  for (int r = 0; r < item.run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const int64_t head = int64_t(first_head_[item.kv_head]) * program_.head_dim;
  const float* q = floats(step.x >= 0 ? step.x : step.out[0], &q_stride);
  float* out = floats(step.out[3], &out_stride);
  AttentionTask task{};
  task.kv_type = KvType(program_.kv_type);
  task.head_dim = program_.head_dim;
  task.kv = kv(step.i[0], item.kv_head);
  task.block_stride = kv_block_bytes_;
  task.block_table = batch_.block_tables + blocks;
  task.first_position = batch_.run[item.run].first_position + item.first;
  task.tokens = item.tokens;
  task.heads = program_.heads_per_kv[item.kv_head];
  task.q = q + (first + item.first) * q_stride + head;
  task.q_token_stride = q_stride;
  task.q_head_stride = program_.head_dim;
  task.out = out + (first + item.first) * out_stride + head;
  task.out_token_stride = out_stride;
  task.out_head_stride = program_.head_dim;
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
  const int64_t total = split.spans * program_.kv_heads;
  const bool even = batch_.runs == 1 && program_.kv_heads % active_ == 0;
  if (even || longest < 4 || longest * active_ * 4 <= total || total > part_count_) return split;
  split.spans_each = std::max<int64_t>(total / (active_ * 8), 1);
  return split;
}

void Executable::attend(int thread, int index) {
  const ckdist_step& step = phase_->steps[index];
  const int kv_heads = program_.kv_heads;
  if (batch_.tokens != batch_.runs) return attend_prompt(thread, index);
  if (active_ > 1 && kv_heads > 0) {
    const Split split = split_of(step);
    if (split.spans_each > 0) return attend_split(thread, index, split);
  }
  // One token per sequence: whoever stores a kv-head's key also attends to it, so no barrier stands between.
  const auto attend_one = [&](int run, int kv_head, bool next) {
    rotate_and_store(thread, step, run, run, kv_head);
    AttentionTask task = task_of(step, {run, 0, 1, kv_head});
    if (next) task.next_kv = kv(step.i[0], kv_head + 1);
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
  const int kv_heads = program_.kv_heads;
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
      const int64_t bytes = kernels_.attention.part_bytes(task.kv_type, 1, task.heads, task.head_dim);
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
  const int kv_heads = program_.kv_heads;
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
