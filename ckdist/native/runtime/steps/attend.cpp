// Attention over the cache: norms and rotation of queries and keys, which are stored with the values, and the sums.
#include <atomic>
#include <cmath>

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

  const Inference::Layer& layer() const { return r.layers[step.layer]; }

  // Of a thread: what the kernel wants, a rotated key, and the squares of a token's heads.
  struct Room {
    uint8_t* scratch;
    float *key, *squares;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    uint8_t* const scratch =
        c.bytes(r.kernels.attention.scratch_bytes(layer.cache, kQueryTile, layer.max_heads_per_kv));
    float* const key = c.floats(layer.cache.key_width);
    return {scratch, key, c.floats(step.squares >= 0 ? r.value(step.squares).width : 0)};
  }
  Room room() const {
    Carver c{r.memory(thread)};
    return room(c, r, step);
  }
  static int64_t thread_bytes(const Inference& r, const Fields& step) {
    Carver c;
    room(c, r, step);
    return c.used;
  }

  // Parts of contexts that threads share: enough for the whole cache, which is less than a hundredth of it.
  static int64_t part_count(const Inference& r, const Inference::Layer& layer) {
    return r.threads() > 1 ? layer.kv_heads * (r.program.blocks * kBlockTokens / kSpan + 2 * r.program.max_sequences)
                           : 0;
  }
  static Parts parts(Carver& c, const Inference& r, const Inference::Layer& layer) {
    const int64_t bytes = (r.kernels.attention.part_bytes(layer.cache, 1, layer.max_heads_per_kv) + 63) / 64 * 64;
    const int64_t merged = r.program.max_sequences * layer.kv_heads;
    auto* const counts =
        reinterpret_cast<std::atomic<int64_t>*>(c.bytes(merged * int64_t{sizeof(std::atomic<int64_t>)}));
    return {counts, c.bytes(part_count(r, layer) * bytes), bytes};
  }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    Carver c;
    parts(c, r, r.layers[step.layer]);
    return c.used;
  }

  Start start_of(int sequence) const {
    Start start;
    for (int s = 0; s < sequence; s++) start.token += r.batch.chunks[s].tokens, start.block += r.batch.chunks[s].blocks;
    return start;
  }

  // The rotation of a head at a position; what of the head is not rotated stays.
  void rotate(const float* x, int64_t position, int64_t width, float* out) const {
    const int64_t dims = step.rope_table < 0 ? 0 : r.program.ropes[step.rope_table].dims;
    if (dims > 0) {
      const ckdist_rope& rope = r.program.ropes[step.rope_table];
      const ElementwiseKernel& k = r.kernels.elementwise;
      (rope.interleaved ? k.rope_pairs : k.rope)(x, rope.cos + position * (dims / 2), rope.sin + position * (dims / 2),
                                                 dims, out);
    }
    if (out != x && dims < width) std::copy(x + dims, x + width, out + dims);
  }

  // What queries and keys of a token are multiplied by, beside their weights, where all heads are normed together.
  void inverse_norms(int64_t token, float* queries, float* keys) {
    const ckdist_layer_attention& a = r.program.attention[step.layer];
    const ckdist_value& v = r.value(step.squares);
    const float* row;
    if (step.rotated >= 0) {
      row = r.peer_row(step.squares, token);
    } else {
      const float* parts[kMaxRanks];
      int64_t stride;
      int count = 1;
      if (v.place == ckdist_place_slot) count = r.ranks->summands(int(v.offset), parts);
      else parts[0] = r.floats(step.squares, &stride);
      for (int p = 0; p < count; p++) parts[p] += token * v.width;
      row = parts[0];
      float* const sums = room().squares;
      if (count > 1) r.kernels.elementwise.sum_parts(nullptr, parts, count, v.width, sums), row = sums;
    }
    const auto inverse = [&](const float* squares, int count) {
      float sum = 0.f;
      for (int h = 0; h < count; h++) sum += squares[h];
      return 1.f / std::sqrt(sum / float(count * layer().cache.key_width) + step.eps);
    };
    *queries = inverse(row, a.total_heads);
    *keys = inverse(row + a.total_heads, a.total_kv_heads);
  }

  // One token's heads of one kv-head: where they are, and where the rotated ones go.
  struct TokenHeads {
    const float *q, *key, *value;
    float *rotated, *rotated_key;
  };
  TokenHeads heads_of(int64_t token, int kv_head) {
    const CacheShape& cache = layer().cache;
    const int64_t head = int64_t(layer().first_head[kv_head]) * cache.key_width,
                  key_column = int64_t(kv_head) * cache.key_width, value_column = int64_t(kv_head) * cache.value_width;
    int64_t stride;
    if (step.rotated < 0) {
      float* const q = r.floats(step.q, &stride) + token * stride + head;
      float* const key = r.floats(step.k, &stride) + token * stride + key_column;
      return {q, key, r.floats(step.v, &stride) + token * stride + value_column, q, key};
    }
    if (r.rank_of(token) != r.ranks->local_rank)
      r.count_moved(thread, ((layer().heads_per_kv[kv_head] + 1) * cache.key_width + cache.value_width) * 4);
    float* const rotated = r.floats(step.rotated, &stride) + token * stride + head;
    return {r.peer_row(step.q, token) + head, r.peer_row(step.k, token) + key_column,
            r.peer_row(step.v, token) + value_column, rotated, room().key};  // as the token's rank wrote them
  }

  // Rotates one token's queries and key of one kv-head (norms first, where the model has them) and stores key and
  // value.
  void rotate_and_store(int sequence, int64_t token, int kv_head) {
    const ElementwiseKernel& k = r.kernels.elementwise;
    const Inference::Layer& of = layer();
    const int width = of.cache.key_width;
    const int64_t head = int64_t(of.first_head[kv_head]) * width, key_column = int64_t(kv_head) * width;
    float q_factor = 0.f, k_factor = 0.f;
    const bool together = step.q_norm >= 0 && step.squares >= 0;
    if (together) inverse_norms(token, &q_factor, &k_factor);
    auto [q, key, value, rotated, rotated_key] = heads_of(token, kv_head);
    const Start start = start_of(sequence);
    const int64_t position = r.batch.chunks[sequence].first_position + token - start.token;
    uint8_t* const block =
        of.kv(kv_head) + r.batch.block_tables[start.block + position / kBlockTokens] * of.block_bytes;
    // A key has a place in each line of its half: they come while it is rotated. Later positions of the block find
    // them.
    if (r.batch.tokens == r.batch.sequences || position % kBlockTokens == 0)
      for (int64_t line = 0; line < of.head_bytes / 2; line += 64) __builtin_prefetch(block + line, 1);
    for (int h = 0; h < of.heads_per_kv[kv_head]; h++, q += width, rotated += width) {
      const float* x = q;
      if (together)
        k.scale_weighted(x, q_factor, r.vector(step.q_norm) + head + h * width, width, rotated), x = rotated;
      else if (step.q_norm >= 0) k.rms_norm(x, r.vector(step.q_norm), step.eps, width, rotated), x = rotated;
      rotate(x, position, width, rotated);
    }
    if (together)
      k.scale_weighted(key, k_factor, r.vector(step.k_norm) + key_column, width, rotated_key), key = rotated_key;
    else if (step.k_norm >= 0) k.rms_norm(key, r.vector(step.k_norm), step.eps, width, rotated_key), key = rotated_key;
    rotate(key, position, width, rotated_key);
    r.kernels.attention.store(of.cache, block, int(position % kBlockTokens), rotated_key, value);
  }

  // Asks for what rotate_and_store() reads: tokens' rows are pages apart, so no hardware brings them.
  void fetch_token(int64_t token, int kv_head) {
    const Inference::Layer& layer = this->layer();
    for (const int32_t of : {step.q, step.k, step.v}) {
      const int64_t width = of == step.v ? layer.cache.value_width : layer.cache.key_width;
      int64_t stride;
      const float* at = step.rotated >= 0 ? r.peer_row(of, token) : r.floats(of, &stride) + token * stride;
      at += (of == step.q ? layer.first_head[kv_head] : kv_head) * width;
      const int64_t n = (of == step.q ? layer.heads_per_kv[kv_head] : 1) * width;
      for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
    }
  }

  AttentionTask task_of(const Item& item) {
    int64_t q_stride, out_stride;
    const Start start = start_of(item.sequence);
    const Inference::Layer& layer = this->layer();
    const CacheShape& cache = layer.cache;
    const int64_t head = layer.first_head[item.kv_head];
    const float* q = r.floats(step.rotated >= 0 ? step.rotated : step.q, &q_stride);
    float* out = r.floats(step.out, &out_stride);
    AttentionTask task{};
    task.key_type = cache.key_type, task.value_type = cache.value_type;
    task.key_width = cache.key_width, task.value_width = cache.value_width;
    task.kv = layer.kv(item.kv_head);
    task.block_stride = layer.block_bytes;
    task.block_table = r.batch.block_tables + start.block;
    task.first_position = r.batch.chunks[item.sequence].first_position + item.first;
    task.tokens = item.tokens;
    task.heads = layer.heads_per_kv[item.kv_head];
    task.q = q + (start.token + item.first) * q_stride + head * cache.key_width;
    task.q_token_stride = q_stride;
    task.q_head_stride = cache.key_width;
    task.out = out + (start.token + item.first) * out_stride + head * cache.value_width;
    task.out_token_stride = out_stride;
    task.out_head_stride = cache.value_width;
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
    const int64_t total = split.spans * layer().kv_heads;
    const bool even = r.batch.sequences == 1 && layer().kv_heads % r.active() == 0;
    if (even || longest < 4 || longest * r.active() * 4 <= total || total > part_count(r, layer())) return split;
    split.spans_each = std::max<int64_t>(total / (r.active() * 8), 1);
    return split;
  }

  void run() {
    const int kv_heads = layer().kv_heads;
    if (r.batch.tokens != r.batch.sequences) return attend_prompt();
    if (r.active() > 1 && kv_heads > 0) {
      const Split split = split_of();
      if (split.spans_each > 0) return attend_split(split);
    }
    // One token per sequence: the thread that stores a kv-head's key also attends to it: no barrier is needed.
    const auto attend_one = [&](int sequence, int kv_head, bool next) {
      rotate_and_store(sequence, sequence, kv_head);
      AttentionTask task = task_of({sequence, 0, 1, kv_head});
      if (next) task.next_kv = layer().kv(kv_head + 1);
      r.kernels.attention.attend(task, r.memory(thread));
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
    const int kv_heads = layer().kv_heads;
    Carver c{r.workspace()};
    const Parts own = parts(c, r, layer());
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
        const int64_t bytes = r.kernels.attention.part_bytes(task.cache(), 1, task.heads);
        r.kernels.attention.attend_spans(task, task.first_span() + from, task.first_span() + to, at + from * bytes,
                                         r.memory(thread));
        std::atomic<int64_t>& merged = own.merged[item];
        if (merged.fetch_add(to - from, std::memory_order_acq_rel) + to - from < spans) continue;
        r.kernels.attention.merge(task, at, r.memory(thread));
      }
      before += tasks, count += spans;
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void attend_prompt() {
    const int kv_heads = layer().kv_heads;
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
      r.kernels.attention.attend(task_of(item), r.memory(thread));
    });
    r.finish(thread, index, step.out, r.batch.tokens);
  }
};

const RegisteredKind<Attend> kKind(ckdist_step_attend);

}  // namespace
}  // namespace ckdist
