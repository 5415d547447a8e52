// Embeddings of n-grams: rows of a table in a file, chosen by hashes of the last tokens, and their dilated convolution.
// The last tokens and rows of a sequence are rings in its slot. Every rank keeps those of all tokens.
#include "runtime/steps/recent_rows.h"

namespace ckdist {
namespace {

constexpr int64_t kNgramColumns = 512;

// Rings have a place more than are read, so a step of single tokens needs no barrier before they are written.
template <class Run, class Write>
void keep(const Run& run, const RecentRows& recent, Write&& write) {
  if (run.r.batch.tokens != run.r.batch.sequences) run.r.meet(run.thread, run.index);
  recent.keep(run.thread, write);
}

struct NgramRows : InferenceRun<ckdist_ngram_rows_step> {
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return r.matrix(step.table).tile_bytes; }

  void run() {
    const StoredMatrix& stored = r.weight(step.table).sliced->stored();
    const RecentRows recent(r, step.layer, ckdist_array_index_rows);
    for (const bool ahead : {true, false})
      each_own_item(r.local_tokens * step.heads, [&](int64_t i) {
        const int64_t row = row_of(recent, i / step.heads, int(i % step.heads));
        if (ahead) stored.will_need_row(row);
        else read(stored, row, i);
      });
    keep(*this, recent, [&](int64_t token, float* to) { std::memcpy(to, &r.batch.token_ids[token], sizeof(int32_t)); });
    r.meet(thread, index, true, [&](Idle) { stored.check_files(); });
  }

  // The id of the token `back` places before one.
  int32_t id_of(const RecentRows& recent, const Inference::Token& at, int64_t token, int64_t back) const {
    if (at.position < back) return step.end;
    if (at.index >= back) return r.batch.token_ids[token - back];
    int32_t id;
    std::memcpy(&id, recent.before(at.sequence, at.position - back), sizeof id);
    return id;
  }

  int64_t row_of(const RecentRows& recent, int64_t t, int head) const {
    const int64_t token = r.first_token + t;
    const Inference::Token at = r.token_of(token);
    const int tokens = 2 + head / step.each;
    uint64_t hash = uint64_t(uint32_t(r.batch.token_ids[token])) * uint64_t(step.multipliers[0]);
    bool ended = false;
    for (int back = 1; back < tokens; back++) {
      const int32_t id = ended ? step.end : id_of(recent, at, token, back);
      ended = ended || id == step.end;
      hash ^= uint64_t(uint32_t(id)) * uint64_t(step.multipliers[back]);
    }
    return int64_t(hash % uint64_t(step.sizes[head])) + step.offsets[head];
  }

  void read(const StoredMatrix& stored, int64_t row, int64_t item) const {
    uint8_t* const tile = r.memory(thread);
    const Matrix& table = r.matrix(step.table);
    float* const out = r.floats(step.out).row(item / step.heads) + item % step.heads * table.cols;
    stored.pack_row(row, tile);
    r.kernels.linear[int(table.type)].unpack_row(tile, 0, table.cols, out);
  }
};

struct ConvolveStreams : InferenceRun<ckdist_convolve_streams_step> {
  void run() {
    const RecentRows recent(r, step.layer, ckdist_array_rows);
    const int64_t chunks = (recent.width + kNgramColumns - 1) / kNgramColumns;
    each_own_item(r.local_tokens * chunks, [&](int64_t i) {
      const int64_t first = i % chunks * kNgramColumns;
      convolve(recent, i / chunks, first, std::min(kNgramColumns, recent.width - first));
    });
    keep(*this, recent, [&](int64_t token, float* to) { std::copy_n(r.row_of(step.rows, token), recent.width, to); });
    r.finish(thread, index, step.out, r.local_tokens);
  }

  void convolve(const RecentRows& recent, int64_t t, int64_t first, int64_t n) const {
    const int64_t token = r.first_token + t;
    const Inference::Token at = r.token_of(token);
    const float* const taps = r.vector(step.conv) + first * step.taps;
    float* const out = r.floats(step.out).row(t) + first;
    std::fill(out, out + n, 0.f);
    for (int k = 0; k < step.taps; k++) {
      const int64_t back = int64_t{step.taps - 1 - k} * step.dilation;
      if (at.position < back) continue;
      const float* const row =
          (at.index >= back ? r.row_of(step.rows, token - back) : recent.before(at.sequence, at.position - back)) +
          first;
      for (int64_t i = 0; i < n; i++) out[i] += taps[i * step.taps + k] * row[i];
    }
    r.kernels.elementwise.activate(GateFunction::silu, out, n);
  }
};

const RegisteredKind<NgramRows> kNgramRows(ckdist_step_ngram_rows);
const RegisteredKind<ConvolveStreams> kConvolveStreams(ckdist_step_convolve_streams);

}  // namespace
}  // namespace ckdist
