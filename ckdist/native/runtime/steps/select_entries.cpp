// Chooses the compressed entries that a token sees: a lightning indexer scores all entries of complete windows. The
// entries with the largest scores are listed, or the positions of their windows.
#include "runtime/steps/carved.h"
#include "runtime/steps/select_run.h"
#include "runtime/steps/window_cache.h"

namespace ckdist {
namespace {

struct SelectEntries : Carved<SelectEntries, AttentionRun<SelectEntries, ckdist_select_entries_step>> {
  AttentionFields attention() const { return {step.layer, step.q, step.out, 0, 0.f, 0.f, nullptr}; }

  // Entries, in whole blocks of scores.
  static int64_t most_entries(const Inference& r, const Fields& step) {
    return blocks_of(r.program.context_length / step.entries.ratio) * kBlockTokens;
  }
  static int width(const Inference& r, const Fields& step) {
    const ckdist_layer& layer = r.program.layers[step.layer];
    const CacheArrays arrays{layer.arrays, layer.array_count};
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
    float* const q = c.floats(int64_t{step.heads} * width(r, step));
    float* const ones = c.floats(step.heads);
    uint8_t* const block = c.bytes(r.kernels.attention.block_bytes(shape(r, step)));
    float* const entry = c.floats(WindowCache::room_floats(width(r, step)));
    return {q, ones, block, entry, c.floats(most_entries(r, step))};
  }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return 4 * r.program.max_sequences * most_entries(r, step);
  }

  const int32_t* table_of(int sequence) const { return r.batch.block_tables + start_of(sequence).block; }
  int64_t listed_width() const { return r.value(step.out).width; }
  int64_t top_k() const { return step.positions ? listed_width() / step.entries.ratio : listed_width(); }
  int64_t entries_of(int64_t position) const { return (position + 1) / step.entries.ratio; }
  int32_t* list_of(int64_t token) {
    int64_t stride;
    return reinterpret_cast<int32_t*>(r.floats(step.out, &stride) + token * listed_width());
  }

  void run() {
    const WindowCache cache(r, step.layer, step.entries, true);
    const int64_t made = cache.each_complete(thread, [&](int sequence, int64_t window) {
      const Rope rope = rotation(start_of(sequence).token, window * step.entries.ratio);
      cache.compress(sequence, start_of(sequence).token, table_of(sequence), window, rope, step.eps, buffers().entry);
    });
    if (made > 0) r.meet(thread, index);
    cache.keep_rows(thread);
    if (r.batch.tokens == r.batch.sequences) {
      run_decode(cache);
    } else {
      r.for_each_item(thread, index, r.batch.tokens, [&](int64_t t) {
        const Token token = token_of(t);
        const int64_t entries = entries_of(token.position);
        if (entries <= top_k()) return;
        score(cache, t, token, 0, blocks_of(entries), buffers().scores);
        list(buffers().scores, token.position, list_of(t));
      });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  // One token per sequence.
  void run_decode(const WindowCache& cache) {
    const int64_t stride = most_entries(r, step);
    float* const scores = reinterpret_cast<float*>(r.workspace());  // (sequences, stride)
    const auto entries_there = [&](int64_t s) { return entries_of(r.batch.chunks[s].first_position); };
    select_by_sequence(
        *this, [&](int64_t s) { return entries_there(s) <= top_k() ? 0 : blocks_of(entries_there(s)); },
        [&](int64_t s, int64_t begin, int64_t end) { score(cache, s, token_of(s), begin, end, scores + s * stride); },
        [&](int64_t s) { list(scores + s * stride, r.batch.chunks[s].first_position, list_of(s)); });
  }

  // Lists the entries that the token of a position sees, or their positions.
  void list(const float* scores, int64_t position, int32_t* out) {
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
  void score(const WindowCache& cache, int64_t t, const Token& token, int64_t begin, int64_t end, float* out) {
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
    const int32_t* const table = table_of(token.sequence);
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

const RegisteredKind<SelectEntries> kKind(ckdist_step_select_entries);

}  // namespace
}  // namespace ckdist
