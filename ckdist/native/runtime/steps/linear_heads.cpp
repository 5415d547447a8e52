// One matrix for each head: out = (first elements of the head times the head's matrix, other elements of the head).
//
// The input of a head is a few columns wide. So the thread that multiplies also quantizes it, and no barrier is needed.
#include "kernels/prefetch.h"
#include "runtime/steps/packed_weight.h"

namespace ckdist {
namespace {

constexpr int64_t kItemRows = 128;  // their activations and results stay in the L2 cache with a head's matrix
constexpr int64_t kRowsAhead = 2;   // rows to prefetch: they are pages apart, so the hardware does not prefetch them

// Prefetches cache lines for writing, so that no other core owns them when they are written.
inline void claim_floats(float* at, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" ::"m"(at[i]));  // compilers emit it only for some ISA levels
#else
    __builtin_prefetch(at + i, 1);
#endif
  }
}

struct LinearHeads : InferenceRun<ckdist_linear_heads_step> {
  static constexpr bool kReadsAhead = true;

  static int64_t row_bytes(const Inference& r, const Fields& step) {
    return step.weight.count ? ActivationRow::bytes(ActivationFormat(step.format), r.matrix(step.weight.first).cols)
                             : 0;
  }
  static int64_t thread_bytes(const Inference& r, const Fields& step) { return kItemRows * row_bytes(r, step); }

  // Items of a head: for few rows its tiles are divided, for many rows the rows are divided.
  struct Items {
    int64_t chunks, pieces;  // parts of the rows and of the tiles
  };
  static Items items_of(const Inference& r, const Fields& step) {
    const int64_t rows = r.batch.tokens, heads = step.weight.count;
    const Items items = {(rows + kItemRows - 1) / kItemRows, 1};
    if (heads * items.chunks >= 2 * r.active() || heads == 0) return items;
    const int64_t wanted = (2 * r.active() + heads - 1) / heads;
    return {items.chunks, std::min(wanted, r.matrix(step.weight.first).tile_count())};
  }

  void run() {
    const Items items = items_of(r, step);
    const int64_t all = step.weight.count * items.chunks * items.pieces;
    const auto work = [&](int64_t i) {
      const int64_t piece = i % items.pieces, chunk = i / items.pieces % items.chunks,
                    head = i / items.pieces / items.chunks;
      const int64_t tiles = r.matrix(step.weight.first + int(head)).tile_count();
      multiply(head, {tiles * piece / items.pieces, tiles * (piece + 1) / items.pieces},
               {chunk * kItemRows, std::min((chunk + 1) * kItemRows, r.batch.tokens)});
    };
    if (r.batch.tokens > r.batch.sequences) r.for_each_item(thread, index, all, work);
    else {
      if (thread < all) work(thread);
      r.take_items(thread, index, std::max<int64_t>(all - r.active(), 0), [&](int64_t i) { work(r.active() + i); });
    }
    r.finish(thread, index, step.out, r.batch.tokens);
  }

  void multiply(int64_t head, Range tiles, Range rows) {
    const Weight& weight = r.weight(step.weight.first + int(head));
    const int64_t n = rows.end - rows.begin, x_stride = row_bytes(r, step), behind = step.x_width - step.columns,
                  out_width = step.head_rows + behind;
    const FloatRows all = r.floats(step.out);
    // (rows, heads, head_rows + behind); x: (tokens, heads, x_width)
    const FloatRows out{all.row(rows.begin) + head * out_width, all.stride};
    uint8_t* const activations = r.memory(thread);
    for (int64_t t = 0; t < n; t++) {
      const float* const later = r.row_of(step.x, std::min(rows.begin + t + kRowsAhead, rows.end - 1));
      fetch_floats(later + head * step.x_width, step.x_width);
      const float* const x = r.row_of(step.x, rows.begin + t) + head * step.x_width;
      claim_floats(out.row(t) + tiles.begin * kTileRows,
                   std::min(tiles.end * kTileRows, step.head_rows) - tiles.begin * kTileRows);
      if (r.value(step.x).place == ckdist_place_tokens && r.rank_of(rows.begin + t) != r.ranks->local_rank)
        r.count_moved(thread, step.x_width * 4);
      r.kernels.elementwise.prepare(ActivationFormat(step.format), x, step.columns, 0, weight.matrix.cols,
                                    activations + t * x_stride);
      if (tiles.begin == 0) std::copy(x + step.columns, x + step.x_width, out.row(t) + step.head_rows);
    }
    each_packed(r, thread, weight, tiles.begin, tiles.end, [&](const Matrix& part, int64_t first) {
      r.multiply(thread, part, activations, x_stride, n, out.at + first * kTileRows, out.stride);
    });
  }

  // Prefetches the weights of the thread's first item.
  static void ahead(Inference& r, int thread, const Fields& step, Ahead& ahead) {
    if (r.batch.tokens > Inference::kFewRows || step.weight.count == 0) return;
    const Items items = items_of(r, step);
    if (thread >= step.weight.count * items.chunks * items.pieces) return;
    const Weight& weight = r.weight(step.weight.first + int(thread / items.pieces / items.chunks));
    const int64_t tiles = weight.matrix.tile_count();
    read_ahead(weight, tiles * (thread % items.pieces) / items.pieces, tiles, INT64_MAX, ahead);
  }
};

const RegisteredKind<LinearHeads> kLinearHeads(ckdist_step_linear_heads);

}  // namespace
}  // namespace ckdist
