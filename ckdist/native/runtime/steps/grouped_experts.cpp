// What the experts make of their tokens in training, and the gradients of that.
//
// Threads take items of (expert, slice of its intermediate size), each of which packs its part of the expert's weights
// once for all of the expert's rows. What is summed over a token's experts is taken by slices of its columns, each over
// all experts in their order: its bits depend neither on threads nor on who was first.
#include "runtime/steps/expert_groups.h"
#include "runtime/steps/part_products.h"

namespace ckdist {
namespace {

constexpr int64_t kRows = PartProducts::kRows;

// What both steps have in common.
template <class Fields>
struct ExpertsRun : TrainingRun<Fields> {
  // A thread's room for products with two matrices.
  struct Room {
    uint8_t *tiles, *second, *gathered;
    float *a, *b, *unpacked;
  };
  // Tiles of an item over the intermediate size, and over the width of tokens.
  static int64_t ffn_tiles(const Training& r, const Fields& step) {
    return PartProducts::item_tiles(r, r.width(step.gate), r.width(step.x), 2);
  }
  static int64_t hidden_tiles(const Training& r, const Fields& step) {
    return PartProducts::item_tiles(r, r.width(step.x), r.width(step.gate), 2);
  }
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t tiles[] = {ffn_tiles(r, step), hidden_tiles(r, step)};
    const int64_t bytes =
        std::max(tiles[0] * r.tile_bytes(r.width(step.x)), tiles[1] * r.tile_bytes(r.width(step.gate)));
    const int64_t floats = kRows * (std::max(tiles[0], tiles[1]) + 1) * kTileRows;
    int64_t unpacked = 0;
    for (const int32_t w : {step.gate_weight, step.up_weight, step.down_weight})
      unpacked = std::max(unpacked, PartProducts::unpacked_floats(r, w));
    uint8_t *const first = c.bytes(bytes), *const second = c.bytes(bytes);
    uint8_t* const gathered = c.bytes(kRows * r.row_stride(step.x));
    float *const a = c.floats(floats), *const b = c.floats(floats);
    return {first, second, gathered, a, b, c.floats(unpacked)};
  }

  // A slice of columns, and a row of products over it.
  struct Slice {
    int64_t begin, columns, stride;
  };
  static int64_t slices(int64_t width, int64_t tiles) { return (width + tiles * kTileRows - 1) / (tiles * kTileRows); }
  static Slice slice(int64_t width, int64_t tiles, int64_t index) {
    const int64_t begin = index * tiles * kTileRows;
    return {begin, std::min(tiles * kTileRows, width - begin), (tiles + 1) * kTileRows};
  }

  const int64_t hidden = this->r.width(this->step.x), ffn = this->r.width(this->step.gate);
  Carver workspace{this->r.workspace()};
  const ExpertGroups groups = ExpertGroups::carve(workspace, this->r, this->step.chosen, this->step.experts);
  Carver carver{this->r.memory(this->thread)};
  const Room own = room(carver, this->r, this->step);
  const PartProducts parts{this->r, own.unpacked};

  void group() {
    this->r.meet(this->thread, this->index, false,
                 [&](Idle) { groups.make(this->r, this->step.chosen, this->step.experts); });
  }
  float share(int64_t row) const { return this->r.floats(this->step.shares, groups.tokens[row])[groups.slots[row]]; }

  // work(first row, rows, activations) for a few of an expert's rows at a time: of each its token's row of `value`.
  template <class Work>
  void each_gathered(int64_t expert, int value, Work&& work) const {
    for (int64_t row = groups.starts[expert]; row < groups.starts[expert + 1]; row += kRows) {
      const int64_t rows = std::min(kRows, groups.starts[expert + 1] - row);
      work(row, rows, parts.gather(value, groups.tokens + row, rows, own.gathered));
    }
  }
  void multiply(const Matrix& m, const Operand& x, int64_t rows, float* y, int64_t stride, bool add = false) const {
    this->r.product.multiply(m, 0, m.tile_count(), x.at, x.stride, rows, y, stride, add);
  }
  // Columns of rows of a value, which has `used` rows of each token.
  Row part(int value, int64_t row, int64_t column) const {
    Row at = this->r.row(value, row);
    at.at += column * this->r.bytes_of(value);
    return at;
  }
  void clear(int value, const Slice& s) const {
    for (int64_t t = 0; t < this->r.batch.tokens; ++t) std::fill_n(this->r.floats(value, t) + s.begin, s.columns, 0.f);
  }
};

struct GroupedExperts : ExpertsRun<ckdist_grouped_experts_step> {
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    Carver c;
    room(c, r, step);
    return c.used;
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    Carver c;
    ExpertGroups::carve(c, r, step.chosen, step.experts);
    return c.used;
  }

  void run() {
    group();
    const int64_t up_tiles = ffn_tiles(r, step), ups = slices(ffn, up_tiles);
    parallel_for(*groups.count * ups,
                 [&](int64_t item) { join(groups.touched[item / ups], slice(ffn, up_tiles, item % ups)); });
    const int64_t down_tiles = hidden_tiles(r, step);
    parallel_for(slices(hidden, down_tiles), [&](int64_t item) { sum(slice(hidden, down_tiles, item)); });
  }

  void join(int64_t expert, const Slice& s) const {
    const int64_t row = expert * ffn + s.begin;
    const Matrix gate = parts.pack({step.gate_weight, row, s.columns, 0, hidden}, own.tiles),
                 up = parts.pack({step.up_weight, row, s.columns, 0, hidden}, own.second);
    each_gathered(expert, step.x, [&](int64_t first, int64_t rows, const Operand& x) {
      multiply(gate, x, rows, own.a, s.stride);
      multiply(up, x, rows, own.b, s.stride);
      for (int64_t i = 0; i < rows; ++i) {
        float *const a = own.a + i * s.stride, *const b = own.b + i * s.stride;
        r.store(step.gate, first + i, s.begin, a, s.columns);
        r.store(step.up, first + i, s.begin, b, s.columns);
        r.kernels.elementwise.gated(GateFunction(step.function), a, b, s.columns, a);
        r.store(step.joined, first + i, s.begin, a, s.columns);
      }
    });
  }

  void sum(const Slice& s) const {
    clear(step.out, s);
    for (int64_t at = 0; at < *groups.count; ++at) {
      const int64_t expert = groups.touched[at], end = groups.starts[expert + 1];
      const Matrix down = parts.pack({step.down_weight, expert * hidden + s.begin, s.columns, 0, ffn}, own.tiles);
      for (int64_t row = groups.starts[expert]; row < end; row += kRows) {
        const int64_t rows = std::min(kRows, end - row);
        multiply(down, r.operand(step.joined, row), rows, own.a, s.stride);
        for (int64_t i = 0; i < rows; ++i)
          r.kernels.elementwise.add_scaled(own.a + i * s.stride, share(row + i), s.columns,
                                           r.floats(step.out, groups.tokens[row + i]) + s.begin);
      }
    }
  }
};

struct GroupedExpertsGrad : ExpertsRun<ckdist_grouped_experts_grad_step> {
  static constexpr int64_t kOuterWidth = PartProducts::kOuterTiles * kTileRows;

  // A thread's room for the gradients of weights.
  struct OuterRoom {
    uint8_t *x, *y, *narrow;
  };
  static OuterRoom outer_room(Carver& c, const Training& r) {
    uint8_t *const x = c.bytes(PartProducts::transposed_bytes(r, kOuterWidth)), *const y = c.bytes(
                                                                                    PartProducts::transposed_bytes(
                                                                                        r, PartProducts::kOuterRows));
    return {x, y, c.bytes(PartProducts::narrow_bytes(r, kOuterWidth))};
  }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    Carver products, outer;
    room(products, r, step), outer_room(outer, r);
    return std::max(products.used, outer.used);
  }
  // Of each row the sums over the slices of what its share is multiplied with.
  static float* share_parts(Carver& c, const Training& r, const Fields& step) {
    const int64_t rows = r.program.max_tokens * r.width(step.chosen);
    return c.floats(rows * slices(r.width(step.gate), ffn_tiles(r, step)));
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    Carver c;
    ExpertGroups::carve(c, r, step.chosen, step.experts);
    share_parts(c, r, step);
    return c.used;
  }

  float* const of_shares = share_parts(workspace, r, step);

  void run() {
    group();
    const int64_t tiles = ffn_tiles(r, step), joins = slices(ffn, tiles);
    parallel_for(*groups.count * joins, [&](int64_t item) {
      unjoin(groups.touched[item / joins], item % joins, joins, slice(ffn, tiles, item % joins));
    });
    // What follows reads that alone: one list of items.
    const int64_t x_tiles = hidden_tiles(r, step), x_items = slices(hidden, x_tiles);
    const int64_t up_items = step.gate_gradient >= 0 || step.up_gradient >= 0
                                 ? step.experts * slices(hidden, PartProducts::kOuterTiles)
                                 : 0,
                  down_items = step.down_gradient >= 0 ? step.experts * slices(ffn, PartProducts::kOuterTiles) : 0;
    const int64_t rows = groups.starts[step.experts], share_items = (rows + kRows - 1) / kRows;
    parallel_for(up_items + down_items + x_items + share_items, [&](int64_t item) {
      if (item < up_items) return add_up(item);
      if ((item -= up_items) < down_items) return add_down(item);
      if ((item -= down_items) < x_items) return sum(slice(hidden, x_tiles, item));
      item -= x_items;
      for (int64_t row = item * kRows; row < std::min(rows, (item + 1) * kRows); ++row) sum_share(row, joins);
    });
  }

  // From the gradient of what an expert makes to that of a slice of what gate and up make, and share * joined.
  void unjoin(int64_t expert, int64_t number, int64_t count, const Slice& s) const {
    const auto function = GateFunction(step.function);
    const Matrix down =
        parts.pack_transposed({step.down_weight, expert * hidden, hidden, s.begin, s.columns}, own.tiles);
    each_gathered(expert, step.dy, [&](int64_t first, int64_t rows, const Operand& dy) {
      multiply(down, dy, rows, own.a, s.stride);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = first + i;
        const Row d{reinterpret_cast<uint8_t*>(own.a + i * s.stride), false},
            joined{reinterpret_cast<uint8_t*>(own.b), false}, gate = part(step.gate, row, s.begin),
                                                              up = part(step.up, row, s.begin);
        r.kernels.row.gated(function, gate, up, s.columns, joined);
        of_shares[row * count + number] = r.kernels.row.dot(joined, d, s.columns);
        r.kernels.row.scale(joined, share(row), s.columns, part(step.joined, row, s.begin));
        r.kernels.row.scale(d, share(row), s.columns, d);
        r.kernels.row.gated_grad(function, gate, up, d, s.columns, part(step.d_gate, row, s.begin),
                                 part(step.d_up, row, s.begin));
        if (s.begin + s.columns == ffn)
          for (const int32_t value : {step.joined, step.d_gate, step.d_up}) r.pad(value, row);
      }
    });
  }

  void sum_share(int64_t row, int64_t count) const {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += of_shares[row * count + i];
    r.floats(step.d_shares, groups.tokens[row])[groups.slots[row]] = sum;
  }

  void sum(const Slice& s) const {
    clear(step.dx, s);
    for (int64_t at = 0; at < *groups.count; ++at) {
      const int64_t expert = groups.touched[at], end = groups.starts[expert + 1];
      const Matrix gate = parts.pack_transposed({step.gate_weight, expert * ffn, ffn, s.begin, s.columns}, own.tiles),
                   up = parts.pack_transposed({step.up_weight, expert * ffn, ffn, s.begin, s.columns}, own.second);
      for (int64_t row = groups.starts[expert]; row < end; row += kRows) {
        const int64_t rows = std::min(kRows, end - row);
        multiply(gate, r.operand(step.d_gate, row), rows, own.a, s.stride);
        multiply(up, r.operand(step.d_up, row), rows, own.a, s.stride, true);
        for (int64_t i = 0; i < rows; ++i)
          r.kernels.elementwise.add(own.a + i * s.stride, s.columns,
                                    r.floats(step.dx, groups.tokens[row + i]) + s.begin);
      }
    }
  }

  // One factor of an expert's gradients: columns of a value by row, or by the rows' tokens.
  struct Factor {
    int32_t value;
    bool by_token;
  };
  Matrix transpose(const Factor& f, int64_t row, int64_t rows, int64_t column, int64_t columns, uint8_t* tiles,
                   uint8_t* narrow) const {
    return parts.transpose(f.value, f.by_token ? groups.tokens + row : nullptr, row, rows, column, columns, tiles,
                           narrow);
  }

  // Columns `s` of the gradients of an expert's matrices, each of `height` rows: the sum of y transposed times x.
  void add(int64_t expert, const Slice& s, const Factor& x, int64_t height, int count, const int32_t* gradients,
           const Factor* ys) const {
    Carver c{r.memory(thread)};
    const OuterRoom own_outer = outer_room(c, r);
    const bool adds = r.adds(step.fresh);
    const auto place = [&](int n) {
      const int64_t width = r.shape(gradients[n]).cols;
      return r.gradient(gradients[n]) + expert * height * width + s.begin;
    };
    for (int n = 0; n < count && groups.rows(expert) == 0 && !adds; ++n)
      if (gradients[n] >= 0)
        for (int64_t i = 0; i < height; ++i) std::fill_n(place(n) + i * r.shape(gradients[n]).cols, s.columns, 0.f);
    for (int64_t row = groups.starts[expert]; row < groups.starts[expert + 1]; row += kOuterColumns) {
      const int64_t rows = std::min(kOuterColumns, groups.starts[expert + 1] - row);
      const Matrix of_x = transpose(x, row, rows, s.begin, s.columns, own_outer.x, own_outer.narrow);
      for (int n = 0; n < count; ++n)
        for (int64_t i = 0; i < height && gradients[n] >= 0; i += PartProducts::kOuterRows) {
          const Matrix y = transpose(ys[n], row, rows, i, std::min(PartProducts::kOuterRows, height - i), own_outer.y,
                                     own_outer.narrow);
          const int64_t width = r.shape(gradients[n]).cols;
          parts.outer(y, of_x, place(n) + i * width, width, adds || row > groups.starts[expert]);
        }
    }
  }
  void add_up(int64_t item) const {
    const int64_t count = slices(hidden, PartProducts::kOuterTiles);
    const int32_t gradients[] = {step.gate_gradient, step.up_gradient};
    const Factor ys[] = {{step.d_gate, false}, {step.d_up, false}};
    add(item / count, slice(hidden, PartProducts::kOuterTiles, item % count), {step.x, true}, ffn, 2, gradients, ys);
  }
  void add_down(int64_t item) const {
    const int64_t count = slices(ffn, PartProducts::kOuterTiles);
    const Factor y{step.dy, true};
    add(item / count, slice(ffn, PartProducts::kOuterTiles, item % count), {step.joined, false}, hidden, 1,
        &step.down_gradient, &y);
  }
};

const RegisteredKind<GroupedExperts> kForward(ckdist_step_grouped_experts);
const RegisteredKind<GroupedExpertsGrad> kBackward(ckdist_step_grouped_experts_grad);

}  // namespace
}  // namespace ckdist
