// Attention over the cache: norms and rotation of queries and keys, which are stored with the values, and the sums.
#include <atomic>

#include "runtime/inference.h"

namespace ckdist {
namespace {

constexpr int kQueryTile = 32;       // query tokens of one attention task
constexpr int64_t kTokensAhead = 2;  // whose heads are fetched while one's are rotated

struct Attend : StepRun<Inference, ckdist_attend_step> {
  struct Item {
    int sequence, first, tokens, kv_head;
  };  // an attention task: query tokens [first, first + tokens) of a sequence
  // Decode attention divided along the context: each (sequence, kv-head) has its parts, and who finishes the last
  // merges them.
  struct Split {
    int64_t spans_each = 0;  // spans of one task; 0: nothing is divided
    int64_t spans = 0;       // of all sequences together
  };
  struct Start {
    int64_t token = 0, block = 0;
  };  // of a sequence in the batch's arrays
  struct Parts {
    std::atomic<int64_t>* merged;  // (sequences, kv_heads): spans whose parts are there
    uint8_t* at;
    int64_t bytes_each;
  };

  static int64_t attention_bytes(const Inference& r) {
    return (r.kernels.attention.scratch_bytes(kQueryTile, r.max_heads_per_kv, r.program.head_dim) + 63) / 64 * 64;
  }
  static int64_t thread_bytes(const Inference& r, const Fields&) { return attention_bytes(r) + r.program.head_dim * 4; }
  static int64_t workspace_bytes(const Inference& r, const Fields&) {
    Carver c;
    parts(c, r);
    return c.used;
  }
  // Parts of contexts that threads share: enough for the whole cache, which is less than a hundredth of it.
  static int64_t part_count(const Inference& r) {
    return r.threads() > 1
               ? r.program.kv_heads * (r.program.blocks * kBlockTokens / kSpan + 2 * r.program.max_sequences)
               : 0;
  }
  static Parts parts(Carver& c, const Inference& r) {
    const int64_t bytes =
        (r.kernels.attention.part_bytes(KvType(r.program.kv_type), 1, r.max_heads_per_kv, r.program.head_dim) + 63) /
        64 * 64;
    const int64_t merged = r.program.max_sequences * r.program.kv_heads;
    auto* const counts =
        reinterpret_cast<std::atomic<int64_t>*>(c.bytes(merged * int64_t{sizeof(std::atomic<int64_t>)}));
    return {counts, c.bytes(part_count(r) * bytes), bytes};
  }
  uint8_t* scratch() const { return r.memory(thread); }
  float* key_room() const { return reinterpret_cast<float*>(r.memory(thread) + attention_bytes(r)); }

  Start start_of(int sequence) const {
    Start start;
    for (int s = 0; s < sequence; s++) start.token += r.batch.chunks[s].tokens, start.block += r.batch.chunks[s].blocks;
    return start;
  }

  // Rotates one token's queries and key of one kv-head (norms first, where the model has them) and stores key and
  // value.
  void rotate_and_store(int sequence, int64_t token, int kv_head) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const int head_dim = r.program.head_dim;
    const int64_t head = int64_t(r.first_head[kv_head]) * head_dim, kv_column = int64_t(kv_head) * head_dim;
    int64_t stride;
    const float *q, *key, *value;
    float *rotated, *rotated_key;
    if (step.rotated >= 0) {  // as the token's rank wrote them
      rotated = r.floats(step.rotated, &stride) + token * stride + head;
      rotated_key = key_room();
      q = r.peer_row(step.q, token) + head, key = r.peer_row(step.k, token) + kv_column,
      value = r.peer_row(step.v, token) + kv_column;
      if (r.rank_of(token) != r.ranks->local_rank)
        r.count_moved(thread, (r.program.heads_per_kv[kv_head] + 2) * head_dim * 4);
    } else {
      q = rotated = r.floats(step.q, &stride) + token * stride + head;
      key = rotated_key = r.floats(step.k, &stride) + token * stride + kv_column;
      value = r.floats(step.v, &stride) + token * stride + kv_column;
    }
    const Start start = start_of(sequence);
    const int64_t position = r.batch.chunks[sequence].first_position + token - start.token;
    uint8_t* const block =
        r.kv(step.layer, kv_head) + r.batch.block_tables[start.block + position / kBlockTokens] * r.kv_block_bytes;
    // A key has a place in each line of its half: they come while it is rotated. Later positions of the block find
    // them.
    if (r.batch.tokens == r.batch.sequences || position % kBlockTokens == 0)
      for (int64_t line = 0; line < r.kv_head_bytes / 2; line += 64) __builtin_prefetch(block + line, 1);
    const float* cos = r.program.rope_cos[step.rope_table] + position * (head_dim / 2);
    const float* sin = r.program.rope_sin[step.rope_table] + position * (head_dim / 2);
    for (int h = 0; h < r.program.heads_per_kv[kv_head]; h++, q += head_dim, rotated += head_dim) {
      const float* x = q;
      if (step.q_norm >= 0) k.rms_norm(x, r.vector(step.q_norm), step.eps, head_dim, rotated), x = rotated;
      k.rope(x, cos, sin, head_dim, rotated);
    }
    if (step.k_norm >= 0) k.rms_norm(key, r.vector(step.k_norm), step.eps, head_dim, rotated_key), key = rotated_key;
    k.rope(key, cos, sin, head_dim, rotated_key);
    r.kernels.attention.store(KvType(r.program.kv_type), block, int(position % kBlockTokens), head_dim, rotated_key,
                              value);
  }

  // Asks for what rotate_and_store() reads: tokens' rows are pages apart, so no hardware brings them.
  void fetch_token(int64_t token, int kv_head) {
    const int head_dim = r.program.head_dim;
    for (const int32_t of : {step.q, step.k, step.v}) {
      int64_t stride;
      const float* at = step.rotated >= 0 ? r.peer_row(of, token) : r.floats(of, &stride) + token * stride;
      at += int64_t(of == step.q ? r.first_head[kv_head] : kv_head) * head_dim;
      const int64_t n = (of == step.q ? r.program.heads_per_kv[kv_head] : 1) * int64_t(head_dim);
      for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
    }
  }

  AttentionTask task_of(const Item& item) {
    int64_t q_stride, out_stride;
    const Start start = start_of(item.sequence);
    const int64_t head = int64_t(r.first_head[item.kv_head]) * r.program.head_dim;
    const float* q = r.floats(step.rotated >= 0 ? step.rotated : step.q, &q_stride);
    float* out = r.floats(step.out, &out_stride);
    AttentionTask task{};
    task.kv_type = KvType(r.program.kv_type);
    task.head_dim = r.program.head_dim;
    task.kv = r.kv(step.layer, item.kv_head);
    task.block_stride = r.kv_block_bytes;
    task.block_table = r.batch.block_tables + start.block;
    task.first_position = r.batch.chunks[item.sequence].first_position + item.first;
    task.tokens = item.tokens;
    task.heads = r.program.heads_per_kv[item.kv_head];
    task.q = q + (start.token + item.first) * q_stride + head;
    task.q_token_stride = q_stride;
    task.q_head_stride = r.program.head_dim;
    task.out = out + (start.token + item.first) * out_stride + head;
    task.out_token_stride = out_stride;
    task.out_head_stride = r.program.head_dim;
    task.scale = step.scale;
    task.soft_cap = step.soft_cap;
    task.window = step.window;
    return task;
  }

  // Splitting costs a barrier. It pays where whole (sequence, kv-head) items cannot be handed out evenly: where the
  // longest is a large share of what each thread should do.
  Split split_of() {
    Split split;
    int64_t longest = 0;
    for (int s = 0; s < r.batch.sequences; s++) {
      AttentionTask task{};
      task.first_position = r.batch.chunks[s].first_position, task.tokens = 1, task.window = step.window;
      const int64_t spans = task.last_span() - task.first_span();
      split.spans += spans, longest = std::max(longest, spans);
    }
    const int64_t total = split.spans * r.program.kv_heads;
    const bool even = r.batch.sequences == 1 && r.program.kv_heads % r.active() == 0;
    if (even || longest < 4 || longest * r.active() * 4 <= total || total > part_count(r)) return split;
    split.spans_each = std::max<int64_t>(total / (r.active() * 8), 1);
    return split;
  }

  void run() {
    const int kv_heads = r.program.kv_heads;
    if (r.batch.tokens != r.batch.sequences) return attend_prompt();
    if (r.active() > 1 && kv_heads > 0) {
      const Split split = split_of();
      if (split.spans_each > 0) return attend_split(split);
    }
    // One token per sequence: whoever stores a kv-head's key also attends to it, so no barrier stands between.
    const auto attend_one = [&](int sequence, int kv_head, bool next) {
      rotate_and_store(sequence, sequence, kv_head);
      AttentionTask task = task_of({sequence, 0, 1, kv_head});
      if (next) task.next_kv = r.kv(step.layer, kv_head + 1);
      r.kernels.attention.attend(task, scratch());
    };
    if (r.batch.sequences == 1 && kv_heads % r.active() == 0) {  // even shares are known ahead
      const int each = kv_heads / r.active();
      for (int h = 0; h < each; h++) attend_one(0, thread * each + h, h + 1 < each);
    } else {
      for (int64_t i; (i = r.next_item(index)) < r.batch.sequences * kv_heads;)
        attend_one(int(i / kv_heads), int(i % kv_heads), false);
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend_split(const Split& split) {
    const int kv_heads = r.program.kv_heads;
    Carver c{r.workspace()};
    const Parts own = parts(c, r);
    for (int64_t i = thread; i < r.batch.sequences * kv_heads; i += r.active()) {
      rotate_and_store(int(i / kv_heads), i / kv_heads, int(i % kv_heads));
      own.merged[i].store(0, std::memory_order_relaxed);
    }
    r.meet(thread, index);
    int64_t i = r.next_item(index), before = 0, count = 0;  // before: tasks of earlier items; count: their parts
    for (int64_t item = 0; item < r.batch.sequences * kv_heads; item++) {
      const int sequence = int(item / kv_heads), kv_head = int(item % kv_heads);
      const AttentionTask task = task_of({sequence, 0, 1, kv_head});
      const int64_t spans = task.last_span() - task.first_span(),
                    tasks = (spans + split.spans_each - 1) / split.spans_each;
      uint8_t* at = own.at + count * own.bytes_each;
      for (; i < before + tasks; i = r.next_item(index)) {
        const int64_t from = (i - before) * split.spans_each, to = std::min(from + split.spans_each, spans);
        const int64_t bytes = r.kernels.attention.part_bytes(task.kv_type, 1, task.heads, task.head_dim);
        r.kernels.attention.attend_spans(task, task.first_span() + from, task.first_span() + to, at + from * bytes,
                                         scratch());
        std::atomic<int64_t>& merged = own.merged[item];
        if (merged.fetch_add(to - from, std::memory_order_acq_rel) + to - from < spans) continue;
        r.kernels.attention.merge(task, at, scratch());
      }
      before += tasks, count += spans;
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend_prompt() {
    const int kv_heads = r.program.kv_heads;
    int64_t blocks = 0, tiles = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      blocks += (chunk.first_position + chunk.tokens - 1) / kBlockTokens - chunk.first_position / kBlockTokens + 1;
      tiles += (chunk.tokens + kQueryTile - 1) / kQueryTile;
    }
    // Heads, or parts of a head's tokens, are divided over the threads alike for both halves. A block's positions are
    // stored by one thread: they share its cache lines.
    const Range own = {kv_heads * blocks * thread / r.active(), kv_heads * blocks * (thread + 1) / r.active()};
    for (int64_t sequence = 0, block = 0, first = 0, end = 0; sequence < r.batch.sequences; sequence++) {
      end += r.batch.chunks[sequence].tokens;
      for (int64_t position = r.batch.chunks[sequence].first_position, next; first < end; first = next, block++) {
        next = std::min(first + kBlockTokens - position % kBlockTokens, end);
        position += next - first;
        for (int h = 0; h < kv_heads; h++) {
          if (h * blocks + block < own.begin || h * blocks + block >= own.end) continue;
          for (int64_t token = first; token < next; token++) {
            fetch_token(std::min(token + kTokensAhead, r.batch.tokens - 1), h);
            rotate_and_store(int(sequence), token, h);
          }
        }
      }
    }
    r.meet(thread, index);
    // A head's keys and values stay in a thread's caches from tile to tile of query tokens, from the last, longest
    // context to the first.
    r.for_each_item(thread, index, tiles * kv_heads, [&](int64_t i) {
      int64_t tile = tiles - 1 - i % tiles;
      int sequence = 0;
      for (int64_t n; tile >= (n = (r.batch.chunks[sequence].tokens + kQueryTile - 1) / kQueryTile); sequence++)
        tile -= n;
      const int first = int(tile) * kQueryTile;
      const Item item = {sequence, first, std::min(kQueryTile, r.batch.chunks[sequence].tokens - first),
                         int(i / tiles)};
      r.kernels.attention.attend(task_of(item), scratch());
    });
    r.finish(thread, index, step.out, r.batch.tokens);
  }
};

const RegisteredKind<Attend> kKind(ckdist_step_attend);

}  // namespace
}  // namespace ckdist
