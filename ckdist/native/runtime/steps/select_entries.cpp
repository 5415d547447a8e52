// Chooses the compressed entries that a token sees: a lightning indexer scores all entries of complete windows. The
// entries with the largest scores are listed, or the positions of their windows.
#include "runtime/steps/select_run.h"
#include "runtime/steps/window_cache.h"

namespace ckdist {
namespace {

struct SelectEntries : SelectRun<SelectEntries, ckdist_select_entries_step> {
  const WindowCache cache{r, step.layer, step.entries, true};

  // Entries, in whole blocks of scores.
  static int64_t score_floats(const Inference& r, const Fields& step) {
    return blocks_of(r.program.context_length / step.entries.ratio) * kBlockTokens;
  }
  static int width(const Inference& r, const Fields& step) {
    const CacheArrays arrays(r.program.layers[step.layer]);
    return int(WindowCache::entry_width(arrays.at(ckdist_array_index_rows).width, step.entries));
  }
  static CacheShape shape(const Inference& r, const Fields& step) {
    const int n = width(r, step);
    return {KvType::f32, KvType::f32, n, n, true};
  }
  // Buffers of one thread: rotated queries, a weight of 1 for each, a block of entries, room for an entry, and the
  // scores of a token.
  struct Room {
    float *q, *ones;
    uint8_t* block;
    float *entry, *scores;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    return {c.floats(int64_t{step.heads} * width(r, step)), c.floats(step.heads),
            c.bytes(r.kernels.attention.block_bytes(shape(r, step))),
            c.floats(WindowCache::room_floats(width(r, step))), c.floats(score_floats(r, step))};
  }

  int64_t listed_width() const { return r.value(step.out).width; }
  int64_t top_k() const { return step.positions ? listed_width() / step.entries.ratio : listed_width(); }
  int64_t entries_of(int64_t position) const { return (position + 1) / step.entries.ratio; }
  int64_t blocks(int64_t position) const {
    return entries_of(position) <= top_k() ? 0 : blocks_of(entries_of(position));
  }

  void run() {
    cache.make_entries(*this, buffers().entry);
    select();
  }

  // Lists the entries that a token sees, or their positions.
  void list(int64_t t, int64_t position, const float* scores) {
    int32_t* const out = list_of(t);
    const int64_t k = top_k(), ratio = step.entries.ratio, entries = entries_of(position);
    if (!step.positions) return select_largest(scores, entries, k, out);
    int32_t* const chosen = out + listed_width() - k;  // moved to the front, each before the places of later ones
    select_largest(scores, entries, k, chosen);
    for (int64_t i = 0; i < k; i++) {
      const int32_t first = chosen[i] * int32_t(ratio);
      for (int64_t j = 0; j < ratio; j++) out[i * ratio + j] = first + int32_t(j);
    }
    for (int64_t j = 0; j < ratio - 1; j++) out[k * ratio + j] = int32_t(std::min(entries * ratio + j, position));
  }

  // Scores of a token for the entries [16 begin, 16 end). The last ones may not exist.
  void score(int64_t t, const Inference::Token& token, int64_t begin, int64_t end, float* out) {
    const Room own = buffers();
    const CacheShape of = shape(r, step);
    const int64_t entries = entries_of(token.position);
    const Rope rope = rotation(t, token.position);
    const float* const x = r.row_of(step.q, t);
    std::copy(x, x + step.heads * of.key_width, own.q);
    for (int h = 0; h < step.heads; h++) {
      float* const head = own.q + h * of.key_width;
      if (step.q_norm >= 0) r.kernels.elementwise.rms_norm(head, r.vector(step.q_norm), step.eps, of.key_width, head);
      WindowCache::rotate(r.kernels.elementwise, head, rope, of.key_width, step.entries.front != 0);
    }
    if (step.weights < 0) std::fill(own.ones, own.ones + step.heads, 1.f);
    const float* const weights = step.weights < 0 ? own.ones : r.row_of(step.weights, t);
    const IndexTask task = {of.key_type, of.key_width, step.heads, own.q, weights};
    const int32_t* const table = r.table_of(token.sequence);
    for (int64_t block = begin; block < end; block++) {
      for (int64_t e = block * kBlockTokens; e < std::min((block + 1) * kBlockTokens, entries); e++) {
        cache.read_entry(table, e, own.entry);
        r.kernels.attention.store(of, own.block, int(e % kBlockTokens), own.entry, nullptr);
      }
      const uint8_t* const entries_block = own.block;
      r.kernels.attention.index_scores(task, &entries_block, 1, out + block * kBlockTokens);
    }
  }
};

const RegisteredKind<SelectEntries> kSelectEntries(ckdist_step_select_entries);

}  // namespace
}  // namespace ckdist
