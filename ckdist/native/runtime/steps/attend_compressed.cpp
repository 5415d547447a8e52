// Attention to a window of keys and to compressed entries of the tokens before. Keys are values too.
//
// The rows that a token sees are copied, in the order of their positions, to blocks of a thread; the kernels attend to
// these blocks. So the bits of a token depend on its rows alone.
#include "runtime/steps/attention_run.h"
#include "runtime/steps/residual.h"
#include "runtime/steps/window_cache.h"

namespace ckdist {
namespace {

struct AttendCompressed : Carved<AttendCompressed, AttentionRun<AttendCompressed, ckdist_attend_compressed_step>> {
  AttentionFields attention() const { return {step.rotated, step.out, 0, step.scale, 0.f, step.sinks}; }

  // Buffers of one thread: the kernel's scratch memory, the rows of a token, a key, and room for an entry.
  struct Room {
    uint8_t *scratch, *rows;
    int32_t* table;
    float *key, *entry;  // an entry that is read; room to make one
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    const Inference::Layer& layer = r.layers[step.layer];
    const int64_t blocks = blocks_of(step.window + most_entries(r, step)), width = layer.cache.key_width;
    return {c.bytes(r.kernels.attention.scratch_bytes(layer.cache, kLatentTile, layer.max_heads_per_kv)),
            c.bytes(blocks * layer.head_bytes), c.array<int32_t>(blocks), c.floats(width),
            c.floats(WindowCache::room_floats(width))};
  }
  static int64_t most_entries(const Inference& r, const Fields& step) {
    if (step.entries.ratio == 0) return 0;
    const int64_t all = r.program.context_length / step.entries.ratio;
    return step.listed >= 0 ? std::min(all, r.value(step.listed).width) : all;
  }

  void run() {
    rotate();
    r.meet(thread, index);
    if (step.entries.ratio > 0) {
      const WindowCache cache(r, step.layer, step.entries, false);
      cache.make_entries(*this, buffers().entry);
    }
    int64_t gathered = -1, count = 0;
    const int tasks = layer().kv_heads > 0 ? tasks_of(r.batch.tokens) : 0;
    const auto work = [&](int64_t i) {
      if (i / tasks != gathered) gathered = i / tasks, count = gather(r.token_of(gathered), gathered);
      const Token token = r.token_of(gathered);
      attend(token, gathered, item_of(token.sequence, token.index, i % tasks, tasks), count);
    };
    if (one_token_each()) r.take_items(thread, index, r.batch.tokens * tasks, work);
    else r.for_each_item(thread, index, r.batch.tokens * tasks, work);
    if (tasks > 0) keep_keys();
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  float* key(int64_t token) { return r.floats(step.keys).row(token); }

  // Each thread norms and rotates an equal part of all tokens' heads and keys.
  void rotate() {
    const FloatRows rotated = r.floats(step.rotated);  // (tokens, heads, key_width)
    const int64_t heads = layer().heads(), width = layer().cache.key_width, each = heads + (heads > 0);
    const ElementwiseKernel& k = r.kernels.elementwise;
    each_own_item(r.batch.tokens * each, [&](int64_t i) {
      const int64_t token = i / each, h = i % each;
      float* const out = h < heads ? rotated.row(token) + h * width : key(token);
      if (h < heads) {
        const float* const x = r.row_of(step.q, token) + h * width;
        scaled(x, 1.f / std::sqrt(k.sum_squares(x, width) / float(width) + step.eps), width, out);
      } else {
        k.rms_norm(r.row_of(step.k, token), r.vector(step.norm), step.eps, width, out);
      }
      WindowCache::rotate(k, out, rotation(token, r.token_of(token).position), width);
    });
  }

  void keep_keys() {
    if (!one_token_each()) r.meet(thread, index);
    const RecentRows recent(r, step.layer, ckdist_array_latent);
    recent.keep(thread, [&](int64_t token, float* to) { std::copy_n(key(token), recent.width, to); });
  }

  // Copies the keys and entries that a token sees to the thread's blocks. Returns their number.
  int64_t gather(const Token& token, int64_t number) {
    const Inference::Layer& of = layer();
    const Room own = buffers();
    int64_t count = 0;
    const auto put = [&](const float* key) {
      uint8_t* const block = own.rows + count / kBlockTokens * of.head_bytes;
      if (count % kBlockTokens == 0) std::memset(block, 0, size_t(of.head_bytes));
      r.kernels.attention.store(of.cache, block, int(count++ % kBlockTokens), key, nullptr);
    };
    const RecentRows recent(r, step.layer, ckdist_array_latent);
    const int64_t first = token.position - token.index;  // of the chunk
    for (int64_t p = std::max<int64_t>(token.position - step.window + 1, 0); p <= token.position; p++)
      put(p < first ? recent.before(token.sequence, p) : key(number + p - token.position));
    if (step.entries.ratio > 0) {
      const WindowCache cache(r, step.layer, step.entries, false);
      int64_t entries = (token.position + 1) / step.entries.ratio;
      const int32_t* list = nullptr;
      if (step.listed >= 0 && entries > r.value(step.listed).width) {
        entries = r.value(step.listed).width;
        list = reinterpret_cast<const int32_t*>(r.row_of(step.listed, number));
      }
      for (int64_t e = 0; e < entries; e++) {
        cache.read_entry(r.table_of(token.sequence), list ? list[e] : e, own.key);
        put(own.key);
      }
    }
    for (int64_t b = 0; b < blocks_of(count); b++) own.table[b] = int32_t(b);
    return count;
  }

  void attend(const Token& token, int64_t number, const Item& item, int64_t count) {
    AttentionTask task = task_of(item);
    task.kv = buffers().rows, task.block_stride = layer().head_bytes, task.block_table = buffers().table;
    task.first_position = count - 1;
    r.kernels.attention.attend(task, buffers().scratch);
    const Rope rope = rotation(number, token.position);
    for (int h = 0; h < task.heads && rope.dims > 0; h++) {
      const Row row = float_row(task.out + h * task.out_head_stride + task.value_width - rope.dims);
      r.kernels.row.rope(row, rope, true, rope.dims, rope.dims, row);
    }
  }
};

const RegisteredKind<AttendCompressed> kAttendCompressed(ckdist_step_attend_compressed);

}  // namespace
}  // namespace ckdist
