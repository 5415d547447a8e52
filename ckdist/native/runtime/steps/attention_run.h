// Common parts of the attention steps: how their work is divided over threads, by kv-heads, query tokens or spans of
// the context.
#pragma once
#include "runtime/scalars.h"
#include "runtime/steps/layer_run.h"

namespace ckdist {

// Most query tokens of one attention task: this number, or as many as have this number of queries. With AMX, the bytes
// of keys and values are split once for up to 128 queries.
constexpr int kQueryTile = 32, kMostQueries = 128;
inline int query_tile(int heads_per_kv) { return std::max(kQueryTile, kMostQueries / std::max(heads_per_kv, 1)); }
// The same for latent attention. Its heads are wide: the sums of 128 queries stay in the L2 cache.
constexpr int kLatentTile = 16;
constexpr int64_t kTasksEach = 8;  // tasks of a thread if contexts are divided
constexpr int64_t kTilesEach = 4;  // tiles of a thread, at least, unless they have fewer queries than this:
constexpr int kLeastQueries = 64;  // two Vecs of queries share each load of a key

// The inputs of a step's tasks: values of rotated queries and of the result, and how scores are computed.
struct AttentionFields {
  int32_t q, out, window;
  float scale, soft_cap = 0.f;
  int32_t sinks = -1;  // vector, one for each local head; -1: none
  bool bidirectional = false;
  bool cross = false;         // attends to an encoder's output
  int32_t relative = -1;      // vector of RelativeBiases; -1: none
  int32_t listed = -1;        // value of positions that tokens see if they have more; -1: all
  int32_t listed_block = 0;   // positions of a block, if blocks are listed for each kv-head; 0: positions are
  int32_t listed_window = 0;  // tokens of a window, if the last, incomplete one ends the list
};

// `Derived` must have `AttentionFields attention() const`.
template <class Derived, class StepFields>
struct AttentionRun : LayerRun<StepFields> {
  using LayerRun<StepFields>::r;
  using LayerRun<StepFields>::thread;
  using LayerRun<StepFields>::index;
  using LayerRun<StepFields>::step;
  using LayerRun<StepFields>::layer;
  using LayerRun<StepFields>::blocks_of;
  using Token = Inference::Token;

  struct Item {
    int sequence, first, tokens, kv_head;
    int kv_heads = 1;  // from kv_head on, in latent attention
    int slot = -1;     // of the token's listed rows; -1: the number of the sequence
  };  // a task: query tokens [first, first + tokens) of a sequence
  // Decode attention divided along the context: each (sequence, kv-head) has parts. The thread that completes the last
  // part merges them.
  struct Split {
    int64_t spans_each = 0;  // spans of one task; 0: not divided
    int64_t spans = 0;       // spans of all sequences together
    int tasks = 0;           // tasks that have the kv-heads of a sequence
  };
  struct Parts {
    std::atomic<int64_t>* merged;  // (sequences, kv_heads): spans whose parts are complete
    uint8_t* at;
  };

  AttentionFields fields() const { return static_cast<const Derived*>(this)->attention(); }

  // Number of parts of contexts that threads share: enough for the whole cache, less than a hundredth of its size.
  static int64_t part_count(const Inference& r, const Inference::Layer& layer) {
    return r.threads() > 1 ? layer.kv_heads * (r.program.blocks * kBlockTokens / kSpan + 2 * r.program.max_sequences)
                           : 0;
  }
  static int64_t part_bytes(const Inference& r, const Inference::Layer& layer, int heads) {
    return (r.kernels.attention.part_bytes(layer.cache, 1, heads) + 63) / 64 * 64;
  }
  static Parts parts(Carver& c, const Inference& r, const Inference::Layer& layer) {
    return {c.array<std::atomic<int64_t>>(r.program.max_sequences * layer.kv_heads),
            c.bytes(part_count(r, layer) * part_bytes(r, layer, layer.max_heads_per_kv))};
  }
  Parts parts() const {
    Carver c{r.workspace()};
    return parts(c, r, layer());
  }
  static int64_t workspace_bytes(const Inference& r, const StepFields& step) {
    return carved_bytes([&](Carver& c) { parts(c, r, r.layers[step.layer]); });
  }

  // Sets the position of a task's queries and their visible context.
  AttentionTask placed(int sequence, int first, int tokens) const {
    const AttentionFields of = fields();
    const BatchView::Chunk& chunk = r.batch.chunks[sequence];
    AttentionTask task{};
    task.first_position = chunk.first_position + first, task.tokens = tokens, task.window = of.window;
    if (of.bidirectional) task.context = chunk.first_position + chunk.tokens;
    if (of.cross) task.context = r.batch.firsts[sequence];
    if (is_listed(task.first_position)) {
      const int64_t block = of.listed_block, window = of.listed_window, position = task.first_position;
      const int64_t unseen = window ? window - 1 - (position + 1) % window : 0;  // at the end of the list
      task.first_position = top_k() - (block ? block - position % block : 1 + unseen);
    }
    return task;
  }

  AttentionTask task_of(const Item& item) {
    const int64_t token = r.starts[size_t(item.sequence)].token + item.first;
    const Inference::Layer& layer = this->layer();
    const CacheShape& cache = layer.cache;
    const int64_t head = layer.first_head[item.kv_head];
    const AttentionFields of = fields();
    const FloatRows q = r.floats(of.q), out = r.floats(of.out);
    AttentionTask task = placed(item.sequence, item.first, item.tokens);
    task.key_type = cache.key_type, task.value_type = cache.value_type;
    task.key_width = cache.key_width, task.value_width = cache.value_width, task.latent = cache.latent;
    task.kv = layer.kv(item.kv_head);
    task.block_stride = layer.block_stride;
    task.block_table = r.table_of(item.sequence);
    task.heads = int(layer.first_head[item.kv_head + item.kv_heads - 1] - head) +
                 layer.heads_per_kv[item.kv_head + item.kv_heads - 1];
    // (tokens, heads, key_width) and, for the result, (tokens, heads, value_width)
    task.q = q.row(token) + head * cache.key_width;
    task.q_token_stride = q.stride;
    task.q_head_stride = cache.key_width;
    task.out = out.row(token) + head * cache.value_width;
    task.out_token_stride = out.stride;
    task.out_head_stride = cache.value_width;
    task.scale = of.scale;
    task.soft_cap = of.soft_cap;
    if (of.relative >= 0) {
      const RelativeBias& bias = r.biases.at(r.vector(of.relative));
      task.bias = bias.of(head), task.bias_reach = bias.reach;
    }
    if (of.sinks >= 0) task.sinks = r.vector(of.sinks) + head;
    if (!is_listed(int64_t{r.batch.chunks[item.sequence].first_position} + item.first)) return task;
    const Listed own = listed();
    const int64_t slot = item.slot < 0 ? item.sequence : item.slot;
    if (of.listed_block > 0) {
      task.block_table = own.table + (slot * layer.kv_heads + item.kv_head) * listed_blocks();
      return task;
    }
    task.kv = own.rows + (cache.latent ? 0 : item.kv_head) * layer.head_bytes;
    task.block_stride = layer.index_offset, task.block_table = own.table + slot * listed_blocks();
    return task;
  }

  // Sparse attention. A token with more than top_k positions sees those that a step has listed for it. Their keys and
  // values are copied to blocks of the workspace, with the same bits, and the kernels attend to these blocks. Each of a
  // number of slots has the rows of one token. Listed blocks are not copied: a table of them takes the place of the
  // sequence's, for each kv-head.
  struct Listed {
    uint8_t* rows;   // (slots, listed_blocks(), bytes of all heads)
    int32_t* table;  // (slots, listed_blocks()); of listed blocks: (slots, kv_heads, listed_blocks())
  };
  int64_t top_k() const {
    const AttentionFields of = fields();
    const int64_t width = r.value(of.listed).width;
    return of.listed_block > 0 ? width / std::max(layer().kv_heads, 1) * of.listed_block : width;
  }
  bool is_listed(int64_t position) const { return fields().listed >= 0 && position >= top_k(); }
  int64_t listed_blocks() const { return blocks_of(top_k()); }
  static int64_t slots(const Inference& r) { return std::max<int64_t>(r.program.max_sequences, r.threads()); }
  // blocks: listed_blocks(), times the kv-heads if blocks are listed, which are not `copied`
  static Listed carve_listed(Carver& c, const Inference& r, const Inference::Layer& layer, int64_t blocks,
                             bool copied) {
    return {c.bytes(copied ? slots(r) * blocks * layer.index_offset : 0), c.array<int32_t>(slots(r) * blocks)};
  }
  Listed listed() const {
    Carver c{r.workspace()};
    parts(c, r, layer());
    return carve_listed(c, r, layer(), listed_blocks(), fields().listed_block == 0);
  }
  static int64_t listed_bytes(const Inference& r, const StepFields& step, int32_t listed, int64_t block = 0) {
    const Inference::Layer& layer = r.layers[step.layer];
    return carved_bytes([&](Carver& c) {
      parts(c, r, layer);
      if (listed >= 0)
        carve_listed(c, r, layer, blocks_of(r.value(listed).width * std::max<int64_t>(block, 1)), !block);
    });
  }

  // Makes the tables of the listed blocks of the tokens [begin, begin + count), in the slots 0, 1, ...
  void make_tables(int64_t begin, int64_t count) {
    const int64_t heads = layer().kv_heads, each = listed_blocks(), per = fields().listed_block / kBlockTokens;
    int32_t* const to = listed().table;
    this->each_own_item(count * heads, [&](int64_t i) {
      const Token token = r.token_of(begin + i / heads);
      if (!is_listed(token.position)) return;
      const auto* const list = reinterpret_cast<const int32_t*>(r.row_of(fields().listed, begin + i / heads));
      const int32_t* const table = r.table_of(token.sequence);
      for (int64_t b = 0; b < each; b++) {
        const int64_t block = list[i % heads * (each / per) + b / per] * per + b % per;
        to[i * each + b] = table[std::min(block, token.position / kBlockTokens)];  // those after its own are not read
      }
    });
  }

  // Copies the listed rows of the tokens [begin, begin + count) to the slots 0, 1, ... Threads divide the blocks.
  void copy_listed(int64_t begin, int64_t count) {
    if (fields().listed_block > 0) return make_tables(begin, count);
    const Inference::Layer& layer = this->layer();
    const Listed own = listed();
    const int64_t each = listed_blocks();
    const int heads = layer.cache.latent ? 1 : layer.kv_heads;
    this->each_own_item(count * each, [&](int64_t i) {
      const Token token = r.token_of(begin + i / each);
      if (!is_listed(token.position)) return;
      const int32_t* const list = reinterpret_cast<const int32_t*>(r.row_of(fields().listed, begin + i / each));
      const int32_t* const table = r.table_of(token.sequence);
      own.table[i] = int32_t(i);
      for (int64_t at = i % each * kBlockTokens, slot = 0; slot < kBlockTokens && at < top_k(); at++, slot++)
        for (int h = 0; h < heads; h++)
          r.kernels.attention.copy(layer.cache, layer.kv(h) + table[list[at] / kBlockTokens] * layer.block_stride,
                                   list[at] % kBlockTokens, own.rows + i * layer.index_offset + h * layer.head_bytes,
                                   int(slot));
    });
  }

  // In how many tasks the kv-heads of a token are, if threads have `items` tokens, or spans of tokens, to share. In
  // latent attention a task makes values of keys once for all groups of heads in it.
  int tasks_of(int64_t items, int64_t least_each = 1) const {
    const int groups = layer().kv_heads;
    if (!layer().cache.latent) return groups;
    const int64_t wanted = (least_each * r.active() + items - 1) / std::max<int64_t>(items, 1);
    return int(std::clamp<int64_t>(wanted, (groups + kLatentTile - 1) / kLatentTile, groups));
  }
  Item item_of(int sequence, int first, int64_t i, int tasks, int slot = -1) const {
    const int groups = layer().kv_heads, begin = int(i * groups / tasks);
    return {sequence, first, 1, begin, int((i + 1) * groups / tasks) - begin, slot};
  }

  // Attention of single tokens of all sequences, whose keys are stored.
  void attend_single(const Split& split) {
    if (split.spans_each > 0) return attend_parts(split);
    const int tasks = tasks_of(r.batch.sequences);
    r.take_items(thread, index, r.batch.sequences * tasks, [&](int64_t i) {
      r.kernels.attention.attend(task_of(item_of(int(i / tasks), 0, i % tasks, tasks)), r.memory(thread));
    });
  }

  // Attention of all tokens, whose keys are stored.
  void attend_listed() {
    if (this->one_token_each()) {
      const Split split = split_of();
      if (split.spans_each > 0) clear_parts();
      copy_listed(0, r.batch.tokens);
      r.meet(thread, index);
      return attend_single(split);
    }
    attend_tiles();
    for (int64_t begin = 0, count; begin < r.batch.tokens; begin += count) {
      count = std::min(slots(r), r.batch.tokens - begin);
      bool any = false;
      for (int64_t t = 0; t < count && !any; t++) any = is_listed(r.token_of(begin + t).position);
      if (!any) continue;
      copy_listed(begin, count);
      r.meet(thread, index);
      const int tasks = tasks_of(count);
      for (int64_t i = thread; i < count * tasks; i += r.active()) {
        const Token token = r.token_of(begin + i / tasks);
        if (!is_listed(token.position)) continue;
        const Item item = item_of(token.sequence, token.index, i % tasks, tasks, int(i / tasks));
        r.kernels.attention.attend(task_of(item), r.memory(thread));
      }
      r.meet(thread, index);
    }
  }

  // Splitting costs a barrier. It is worth it if whole (sequence, kv-head) items cannot be divided evenly: if the
  // longest item is a large part of one thread's share.
  Split split_of() {
    Split split;
    if (r.active() == 1) return split;
    int64_t longest = 0;
    for (int s = 0; s < r.batch.sequences; s++) {
      const AttentionTask task = placed(s, 0, 1);
      const int64_t spans = task.last_span() - task.first_span();
      split.spans += spans, longest = std::max(longest, spans);
    }
    int64_t total = split.spans * layer().kv_heads;
    const bool even = r.batch.sequences == 1 && layer().kv_heads % r.active() == 0;
    if (even || longest < 4 || longest * r.active() * 4 <= total || total > part_count(r, layer())) return split;
    split.tasks = tasks_of(split.spans, kTasksEach);
    // A task of several groups may need more memory than they do, because its queries are in whole Vecs.
    if (split.spans * split.tasks * bytes_of(split) > part_count(r, layer()) * bytes_of({}))
      split.tasks = layer().kv_heads;
    total = split.spans * split.tasks;
    split.spans_each = std::max<int64_t>(total / (r.active() * kTasksEach), 1);
    return split;
  }

  // Bytes of a part of a task.
  int64_t bytes_of(const Split& split) const {
    const int groups = split.tasks > 0 ? (layer().kv_heads + split.tasks - 1) / split.tasks : 1;
    return part_bytes(r, layer(), groups * layer().max_heads_per_kv);
  }

  // Resets this thread's part of the counters of attend_parts(). A barrier must follow.
  void clear_parts() {
    const int64_t items = r.batch.sequences * layer().kv_heads;
    const Parts own = parts();
    for (int64_t i = thread; i < items; i += r.active()) own.merged[i].store(0, std::memory_order_relaxed);
  }

  // Attends to the parts that this thread takes, for a batch of single tokens whose keys are stored.
  void attend_parts(const Split& split) {
    const int tasks_each = split.tasks;
    const Parts own = parts();
    const auto spans_of = [&](int64_t item) {
      const AttentionTask task = placed(int(item / tasks_each), 0, 1);
      return task.last_span() - task.first_span();
    };
    const auto tasks_of = [&](int64_t spans) { return (spans + split.spans_each - 1) / split.spans_each; };
    int64_t all = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) all += tasks_of(spans_of(s * tasks_each)) * tasks_each;
    int64_t item = 0, before = 0, count = 0;  // the item of a task; tasks, and spans, of earlier items
    r.take_items(thread, index, all, [&](int64_t i) {
      if (i < before) item = before = count = 0;  // the task of another group
      int64_t spans = spans_of(item);
      for (int64_t tasks; i >= before + (tasks = tasks_of(spans)); spans = spans_of(++item))
        before += tasks, count += spans;
      const AttentionTask task = task_of(item_of(int(item / tasks_each), 0, item % tasks_each, tasks_each));
      uint8_t* const at = own.at + count * bytes_of(split);
      const int64_t from = (i - before) * split.spans_each, to = std::min(from + split.spans_each, spans);
      const int64_t bytes = r.kernels.attention.part_bytes(task.cache(), 1, task.heads);
      r.kernels.attention.attend_spans(task, task.first_span() + from, task.first_span() + to, at + from * bytes,
                                       r.memory(thread));
      std::atomic<int64_t>& merged = own.merged[item];
      if (merged.fetch_add(to - from, std::memory_order_acq_rel) + to - from < spans) return;
      r.kernels.attention.merge(task, at, r.memory(thread));
    });
  }

  // Attention for tokens of prompts, whose keys are stored, if they see all positions before them.
  void attend_tiles() {
    const int kv_heads = layer().kv_heads;
    int tile_tokens = layer().cache.latent ? kLatentTile : query_tile(layer().max_heads_per_kv);
    const int32_t listed = fields().listed;
    const auto dense_tokens = [&](int64_t s) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      return listed < 0 ? chunk.tokens : int(std::clamp<int64_t>(top_k() - chunk.first_position, 0, chunk.tokens));
    };
    const auto tiles_of = [&](int64_t s) { return (dense_tokens(s) + tile_tokens - 1) / tile_tokens; };
    const auto count = [&] {
      int64_t tiles = 0;
      for (int64_t s = 0; s < r.batch.sequences; s++) tiles += tiles_of(s);
      return tiles;
    };
    // Many threads take smaller tiles, so that none of them waits long for another one's last tile.
    int64_t tiles = count();
    while (tiles * kv_heads < kTilesEach * r.active() && tile_tokens * layer().max_heads_per_kv >= 2 * kLeastQueries) {
      tile_tokens /= 2;
      tiles = count();
    }
    // Keys and values of a head stay in a thread's caches from one tile of query tokens to the next. Tiles go from the
    // longest context (the last tile) to the shortest.
    r.for_each_item(thread, index, tiles * kv_heads, [&](int64_t i) {
      int64_t tile = tiles - 1 - i % tiles;
      int sequence = 0;
      for (int64_t n; tile >= (n = tiles_of(sequence)); sequence++) tile -= n;
      const int first = int(tile) * tile_tokens, left = dense_tokens(sequence) - first;
      const Item item = {sequence, first, std::min(tile_tokens, left), int(i / tiles)};
      r.kernels.attention.attend(task_of(item), r.memory(thread));
    });
  }
};

}  // namespace ckdist
