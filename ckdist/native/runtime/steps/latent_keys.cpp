// Keys of every head from latent vectors, in training, and their gradients. The thread that multiplies by a head's
// matrix packs it. Sums over heads are in the order of heads.
#include "runtime/steps/part_products.h"

namespace ckdist {
namespace {

constexpr int64_t kKeyRows = PartProducts::kRows;
constexpr int64_t kKeyTokens = 256;                          // tokens of an item
constexpr int64_t kRankRows = 4 * PartProducts::kOuterRows;  // rows of a head's gradient in one item

// Columns of a head's matrix, and the head's width: those columns and the elements after them.
struct HeadSizes {
  int64_t heads, columns, width;
};
HeadSizes sizes_of(const Training& r, int32_t weight, int64_t rank, int64_t row) {
  const int64_t heads = r.shape(weight).rows / rank;
  return {heads, r.shape(weight).cols, row / heads};
}

struct LatentKeys : Carved<LatentKeys, TrainingRun<ckdist_latent_keys_step>> {
  struct Room {
    uint8_t* tiles;
    float *y, *unpacked;  // (kKeyRows, columns of a head)
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t columns = r.shape(step.weight).cols;
    return {c.bytes(tiles_of(columns) * r.tile_bytes(step.rank)), c.floats(kKeyRows * tiles_of(columns) * kTileRows),
            c.floats(PartProducts::unpacked_floats(r, step.weight))};
  }

  const HeadSizes of = sizes_of(r, step.weight, step.rank, r.width(step.out));
  const Room own = buffers();

  void run() {
    parallel_for(of.heads * parts_of(r.batch.tokens, kKeyTokens),
                 [&](int64_t item) { head(item % of.heads, item / of.heads * kKeyTokens); });
  }

  void head(int64_t head, int64_t first) const {
    const Matrix keys = PartProducts(r, own.unpacked)
                            .pack_transposed({step.weight, head * step.rank, step.rank, 0, of.columns}, own.tiles);
    const int64_t end = std::min(first + kKeyTokens, r.batch.tokens), stride = tiles_of(of.columns) * kTileRows;
    for (int64_t t = first; t < end; t += kKeyRows) {
      const int64_t rows = std::min(kKeyRows, end - t);
      const Operand x = r.operand(step.x, t);
      r.product.multiply(keys, 0, keys.tile_count(), x.at, x.stride, rows, own.y, stride, false);
      for (int64_t i = 0; i < rows; ++i) {
        r.store(step.out, t + i, head * of.width, own.y + i * stride, of.columns);
        std::copy_n(x.row(i) + step.rank * r.element_bytes(), (of.width - of.columns) * r.element_bytes(),
                    r.operand(step.out, t + i).at + (head * of.width + of.columns) * r.element_bytes());
        if (head + 1 == of.heads) r.pad(step.out, t + i);
      }
    }
  }
};

struct LatentKeysGrad : Carved<LatentKeysGrad, TrainingRun<ckdist_latent_keys_grad_step>> {
  struct Room {
    uint8_t* tiles;
    float *sums, *widened, *unpacked;  // (kKeyTokens, slice of rank), two rows of the elements after the rank
  };
  static int64_t item_tiles(const Training& r, const Fields& step) {
    return PartProducts::item_tiles(r, step.rank, r.shape(step.weight).cols, 1);
  }
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t tiles = item_tiles(r, step), behind = r.width(step.dx) - step.rank;
    return {c.bytes(tiles * r.tile_bytes(r.shape(step.weight).cols)), c.floats(kKeyTokens * tiles * kTileRows),
            c.floats(2 * behind), c.floats(PartProducts::unpacked_floats(r, step.weight))};
  }

  const HeadSizes of = sizes_of(r, step.weight, step.rank, r.width(step.dy));
  const Room own = buffers();

  void run() {
    const int64_t columns = item_tiles(r, step) * kTileRows, slices = parts_of(step.rank, columns);
    parallel_for((slices + 1) * parts_of(r.batch.tokens, kKeyTokens), [&](int64_t item) {
      const int64_t slice = item % (slices + 1), first = item / (slices + 1) * kKeyTokens,
                    tokens = std::min(kKeyTokens, r.batch.tokens - first), begin = slice * columns;
      if (slice == slices) sum_behind(first, tokens);
      else sum_heads(first, tokens, begin, std::min(columns, step.rank - begin));
    });
  }

  // Elements [begin, begin + n) of the gradients of the latent vectors, summed over heads.
  void sum_heads(int64_t first, int64_t tokens, int64_t begin, int64_t n) const {
    const int64_t stride = tiles_of(n) * kTileRows;
    for (int64_t head = 0; head < of.heads; ++head) {
      const Matrix part =
          PartProducts(r, own.unpacked).pack({step.weight, head * step.rank + begin, n, 0, of.columns}, own.tiles);
      const Operand dy = r.head_of(step.dy, first, head, of.width);
      r.product.multiply(part, 0, part.tile_count(), dy.at, dy.stride, tokens, own.sums, stride, head > 0);
    }
    for (int64_t t = 0; t < tokens; ++t) r.store(step.dx, first + t, begin, own.sums + t * stride, n);
  }

  // Gradients of the elements after the rank, which all heads share: their sum over heads.
  void sum_behind(int64_t first, int64_t tokens) const {
    const int64_t behind = of.width - of.columns;
    float *const sum = own.widened, *const part = sum + behind;
    for (int64_t t = first; t < first + tokens && behind > 0; ++t) {
      std::fill_n(sum, behind, 0.f);
      for (int64_t head = 0; head < of.heads; ++head) {
        r.copy(step.dy, t, head * of.width + of.columns, behind, part);
        r.kernels.elementwise.add(part, behind, sum);
      }
      r.store(step.dx, t, step.rank, sum, behind);
    }
  }
};

struct LatentKeysWeightGrad : Carved<LatentKeysWeightGrad, TrainingRun<ckdist_latent_keys_weight_grad_step>> {
  struct Room {
    uint8_t *dy, *x;
  };
  static Room room(Carver& c, const Training& r, const Fields& step) {
    return {c.bytes(PartProducts::transposed_bytes(r, r.shape(step.gradient).cols)),
            c.bytes(PartProducts::transposed_bytes(r, PartProducts::kOuterRows))};
  }

  const HeadSizes of = sizes_of(r, step.gradient, step.rank, r.width(step.dy));
  const Room own = buffers();

  void run() {
    parallel_for(of.heads * parts_of(step.rank, kRankRows), [&](int64_t item) {
      const int64_t begin = item / of.heads * kRankRows;
      add(item % of.heads, begin, std::min(begin + kRankRows, step.rank));
    });
  }

  // Adds rows [begin, end) of a head's gradient, (rank, columns).
  void add(int64_t head, int64_t begin, int64_t end) const {
    const PartProducts parts(r, nullptr);
    for (int64_t t = 0; t < r.batch.tokens; t += kOuterColumns) {
      const int64_t tokens = std::min(kOuterColumns, r.batch.tokens - t);
      const Matrix dy = parts.transpose(step.dy, nullptr, t, tokens, head * of.width, of.columns, own.dy, nullptr);
      for (int64_t row = begin; row < end; row += PartProducts::kOuterRows) {
        const int64_t rows = std::min(PartProducts::kOuterRows, end - row);
        const Matrix x = parts.transpose(step.x, nullptr, t, tokens, row, rows, own.x, nullptr);
        parts.outer(x, dy, r.gradient(step.gradient) + (head * step.rank + row) * of.columns, of.columns,
                    t > 0 || r.adds(step.fresh));
      }
    }
  }
};

const RegisteredKind<LatentKeys> kLatentKeys(ckdist_step_latent_keys);
const RegisteredKind<LatentKeysGrad> kLatentKeysGrad(ckdist_step_latent_keys_grad);
const RegisteredKind<LatentKeysWeightGrad> kLatentKeysWeightGrad(ckdist_step_latent_keys_weight_grad);

}  // namespace
}  // namespace ckdist
