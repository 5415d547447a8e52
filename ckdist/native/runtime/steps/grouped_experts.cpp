// The experts of a layer in training, and their gradients.
//
// Threads take items of (expert, slice of its intermediate size). An item packs its part of the expert's weights once
// for all rows of the expert. Sums over a token's experts are divided into slices of columns; each slice sums over all
// experts in order. So the bits do not depend on the threads or on their timing.
#include "runtime/scalars.h"
#include "runtime/steps/expert_groups.h"
#include "runtime/steps/part_products.h"

namespace ckdist {
namespace {

constexpr int64_t kRows = PartProducts::kRows;

// Common parts of both steps.
template <class Fields>
struct ExpertsRun : TrainingRun<Fields> {
  static constexpr int kGate = 0, kUp = 1, kDown = 2;

  // Buffers of one thread for products with two matrices, and with two of LoRA.
  struct Room {
    uint8_t *tiles, *second, *low[2], *gathered;  // packed matrices, packed matrices of LoRA, (kRows, width)
    float *a, *b, *unpacked;                      // (kRows, slice stride) twice
  };
  // Tiles of an item over the intermediate size, and over the hidden size.
  static int64_t ffn_tiles(const Training& r, const Fields& step) {
    return PartProducts::item_tiles(r, r.width(step.gate), r.width(step.x), 2);
  }
  static int64_t hidden_tiles(const Training& r, const Fields& step) {
    return PartProducts::item_tiles(r, r.width(step.x), r.width(step.gate), 2);
  }
  // The largest rank of LoRA's matrices; 0 if there are none.
  static int64_t rank(const Training& r, const Fields& step) {
    int64_t most = 0;
    for (const auto& low : step.low)
      if (low.a >= 0) most = std::max(most, r.width(low.low));
    return most;
  }
  static Room room(Carver& c, const Training& r, const Fields& step) {
    const int64_t widths[] = {r.width(step.x), r.width(step.gate)};
    const int64_t most = rank(r, step), low_tiles = tiles_of(most),
                  tiles = std::max({ffn_tiles(r, step), hidden_tiles(r, step), low_tiles});
    const int64_t bytes =
        std::max({ffn_tiles(r, step) * r.tile_bytes(widths[0]), hidden_tiles(r, step) * r.tile_bytes(widths[1]),
                  low_tiles * r.tile_bytes(std::max(widths[0], widths[1]))});
    int64_t unpacked = 0;
    const auto unpack = [&](int32_t w) {
      if (w >= 0) unpacked = std::max(unpacked, PartProducts::unpacked_floats(r, w));
    };
    for (const int32_t w : {step.gate_weight, step.up_weight, step.down_weight}) unpack(w);
    for (const auto& low : step.low) unpack(low.a), unpack(low.b);
    const int64_t low = most ? tiles * r.tile_bytes(most) : 0, products = kRows * (tiles + 1) * kTileRows;
    return {c.bytes(bytes),
            c.bytes(bytes),
            {c.bytes(low), c.bytes(low)},
            c.bytes(kRows * std::max(r.row_stride(step.x), r.row_stride(step.gate))),
            c.floats(products),
            c.floats(products),
            c.floats(unpacked)};
  }

  // A slice of columns, and the stride of products over it.
  struct Slice {
    int64_t begin, columns, stride;
  };
  static int64_t slices(int64_t width, int64_t tiles) { return parts_of(width, tiles * kTileRows); }
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

  // Runs work(first row, rows, activations) for a few of an expert's rows at a time. The activations are gathered rows
  // of `value` of the rows' tokens.
  template <class Work>
  void each_gathered(int64_t expert, int value, Work&& work) const {
    for (int64_t row = groups.starts[expert]; row < groups.starts[expert + 1]; row += kRows) {
      const int64_t rows = std::min(kRows, groups.starts[expert + 1] - row);
      work(row, rows, parts.gather(value, groups.tokens + row, rows, own.gathered));
    }
  }
  // The same for a value that has one row for each (token, expert), without gathering.
  template <class Work>
  void each_row(int64_t expert, int value, Work&& work) const {
    for (int64_t row = groups.starts[expert]; row < groups.starts[expert + 1]; row += kRows)
      work(row, std::min(kRows, groups.starts[expert + 1] - row), this->r.operand(value, row));
  }

  // y += rows of `value` times a matrix. No-op if there is no LoRA.
  void add_low(const Matrix& m, int value, int64_t row, int64_t rows, float* y, int64_t stride) const {
    if (m.tiles != nullptr) multiply(m, this->r.operand(value, row), rows, y, stride, true);
  }
  // Packs rows [row, row + rows) of a stack of matrices B.
  template <class Low>
  Matrix pack_b(const Low& low, int64_t row, int64_t rows, uint8_t* tiles) const {
    if (low.b < 0) return Matrix{};
    return parts.pack({low.b, row, rows, 0, this->r.width(low.low)}, tiles);
  }
  // Packs columns `s` of an expert's A, transposed, for the backward pass.
  template <class Low>
  Matrix pack_a_transposed(const Low& low, int64_t expert, const Slice& s, uint8_t* tiles) const {
    if (low.a < 0) return Matrix{};
    const int64_t rank = this->r.width(low.low);
    return parts.pack_transposed({low.a, expert * rank, rank, s.begin, s.columns}, tiles);
  }
  // Stores scale * (rows times a matrix) in the value `to`. The number of the matrix's rows is the rank.
  void store_low(const Matrix& m, int64_t first, int64_t rows, const Operand& x, int to) const {
    const int64_t rank = this->r.width(to), stride = m.tile_count() * kTileRows;
    multiply(m, x, rows, own.a, stride);
    for (int64_t i = 0; i < rows; ++i) {
      const Row y = float_row(own.a + i * stride);
      this->r.kernels.row.scale(y, this->step.scale, rank, y);
      this->r.store(to, first + i, 0, own.a + i * stride, rank);
    }
  }

  // This rank's columns of an expert's bias, from `column` on, or null.
  const float* bias(int32_t parameter, int64_t expert, int64_t column) const {
    if (parameter < 0) return nullptr;
    return this->r.parameter(parameter) + expert * (this->r.shape(parameter).cols / this->step.experts) + column;
  }
  void add_bias(const float* bias, int64_t n, float* y) const {
    if (bias != nullptr) this->r.kernels.elementwise.add(bias, n, y);
  }

  void multiply(const Matrix& m, const Operand& x, int64_t rows, float* y, int64_t stride, bool add = false) const {
    this->r.product.multiply(m, 0, m.tile_count(), x.at, x.stride, rows, y, stride, add);
  }
  // Row `row` of a value from column `column` on. The value has one row for each (token, expert).
  Row part(int value, int64_t row, int64_t column) const {
    // (tokens * used, width)
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
    return carved_bytes([&](Carver& c) { room(c, r, step); });
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) { ExpertGroups::carve(c, r, step.chosen, step.experts); });
  }

  void run() {
    group();
    if (step.low[kGate].a >= 0 || step.low[kUp].a >= 0)
      parallel_for(*groups.count, [&](int64_t item) {
        for (const int at : {kGate, kUp}) make_low(groups.touched[item], step.low[at], hidden);
      });
    const int64_t up_tiles = ffn_tiles(r, step), ups = slices(ffn, up_tiles);
    parallel_for(*groups.count * ups,
                 [&](int64_t item) { join(groups.touched[item / ups], slice(ffn, up_tiles, item % ups)); });
    if (step.low[kDown].a >= 0)
      parallel_for(*groups.count, [&](int64_t item) { make_low(groups.touched[item], step.low[kDown], ffn); });
    const int64_t down_tiles = hidden_tiles(r, step);
    parallel_for(slices(hidden, down_tiles), [&](int64_t item) { sum(slice(hidden, down_tiles, item)); });
  }

  // Multiplies an expert's rows, of `columns` columns, by A.
  void make_low(int64_t expert, const ckdist_expert_low& low, int64_t columns) const {
    if (low.a < 0) return;
    const int64_t rank = r.width(low.low);
    const Matrix a = parts.pack({low.a, expert * rank, rank, 0, columns}, own.tiles);
    const auto store = [&](int64_t first, int64_t rows, const Operand& x) { store_low(a, first, rows, x, low.low); };
    if (&low == step.low + kDown) each_row(expert, step.joined, store);
    else each_gathered(expert, step.x, store);
  }

  void join(int64_t expert, const Slice& s) const {
    const int64_t row = expert * ffn + s.begin, column = step.bias_column + s.begin;
    const Matrix gate = parts.pack({step.gate_weight, row, s.columns, 0, hidden}, own.tiles),
                 up = parts.pack({step.up_weight, row, s.columns, 0, hidden}, own.second),
                 gate_b = pack_b(step.low[kGate], row, s.columns, own.low[0]),
                 up_b = pack_b(step.low[kUp], row, s.columns, own.low[1]);
    const float *const gate_bias = bias(step.gate_bias, expert, column), *const up_bias =
                                                                             bias(step.up_bias, expert, column);
    each_gathered(expert, step.x, [&](int64_t first, int64_t rows, const Operand& x) {
      multiply(gate, x, rows, own.a, s.stride);
      multiply(up, x, rows, own.b, s.stride);
      add_low(gate_b, step.low[kGate].low, first, rows, own.a, s.stride);
      add_low(up_b, step.low[kUp].low, first, rows, own.b, s.stride);
      for (int64_t i = 0; i < rows; ++i) {
        float *const a = own.a + i * s.stride, *const b = own.b + i * s.stride;
        add_bias(gate_bias, s.columns, a), add_bias(up_bias, s.columns, b);
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
      const int64_t expert = groups.touched[at], first_row = expert * hidden + s.begin;
      const Matrix down = parts.pack({step.down_weight, first_row, s.columns, 0, ffn}, own.tiles),
                   down_b = pack_b(step.low[kDown], first_row, s.columns, own.low[0]);
      const float* const down_bias = bias(step.down_bias, expert, s.begin);
      each_row(expert, step.joined, [&](int64_t row, int64_t rows, const Operand& x) {
        multiply(down, x, rows, own.a, s.stride);
        add_low(down_b, step.low[kDown].low, row, rows, own.a, s.stride);
        for (int64_t i = 0; i < rows; ++i) {
          add_bias(down_bias, s.columns, own.a + i * s.stride);
          r.kernels.elementwise.add_scaled(own.a + i * s.stride, share(row + i), s.columns,
                                           r.floats(step.out, groups.tokens[row + i]) + s.begin);
        }
      });
    }
  }
};

struct GroupedExpertsGrad : ExpertsRun<ckdist_grouped_experts_grad_step> {
  static constexpr int64_t kOuterWidth = PartProducts::kOuterTiles * kTileRows;

  // Buffers of one thread for the gradients of weights.
  struct OuterRoom {
    uint8_t *x, *y, *narrow;
    float* row;
  };
  static OuterRoom outer_room(Carver& c, const Training& r, const Fields& step) {
    return {c.bytes(PartProducts::transposed_bytes(r, kOuterWidth)),
            c.bytes(PartProducts::transposed_bytes(r, PartProducts::kOuterRows)),
            c.bytes(PartProducts::narrow_bytes(r, kOuterWidth)),
            c.floats(std::max(r.width(step.x), r.width(step.gate)))};
  }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return std::max(carved_bytes([&](Carver& c) { room(c, r, step); }),
                    carved_bytes([&](Carver& c) { outer_room(c, r, step); }));
  }
  // (tokens * used, slices): for each row and slice the dot product whose sum over slices is the gradient of the row's
  // share.
  static float* share_parts(Carver& c, const Training& r, const Fields& step) {
    const int64_t rows = r.program.max_tokens * r.width(step.chosen);
    return c.floats(rows * slices(r.width(step.gate), ffn_tiles(r, step)));
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) {
      ExpertGroups::carve(c, r, step.chosen, step.experts);
      share_parts(c, r, step);
    });
  }

  float* const of_shares = share_parts(workspace, r, step);

  void run() {
    group();
    if (step.low[kDown].a >= 0) parallel_for(*groups.count, [&](int64_t item) { go_back_down(groups.touched[item]); });
    const int64_t tiles = ffn_tiles(r, step), joins = slices(ffn, tiles);
    parallel_for(*groups.count * joins, [&](int64_t item) {
      unjoin(groups.touched[item / joins], item % joins, joins, slice(ffn, tiles, item % joins));
    });
    if (step.low[kGate].a >= 0 || step.low[kUp].a >= 0)
      parallel_for(*groups.count, [&](int64_t item) {
        go_back_up(groups.touched[item], step.low[kGate], step.d_gate);
        go_back_up(groups.touched[item], step.low[kUp], step.d_up);
      });
    // All remaining work reads only finished values: one list of items.
    Outer outers[8];
    const int count = list_outers(outers);
    int64_t outer_items = 0;
    for (int n = 0; n < count; ++n) outer_items += items_of(outers[n]);
    const bool biased = step.gate_bias_gradient >= 0 || step.up_bias_gradient >= 0 || step.down_bias_gradient >= 0;
    const int64_t x_tiles = hidden_tiles(r, step), x_items = slices(hidden, x_tiles),
                  bias_items = biased ? step.experts : 0;
    const int64_t rows = groups.starts[step.experts], share_items = (rows + kRows - 1) / kRows;
    parallel_for(outer_items + bias_items + x_items + share_items, [&](int64_t item) {
      for (int n = 0; n < count; item -= items_of(outers[n++]))
        if (item < items_of(outers[n])) return add(outers[n], item);
      if (item < bias_items) return add_biases(item);
      if ((item -= bias_items) < x_items) return sum(slice(hidden, x_tiles, item));
      item -= x_items;
      for (int64_t row = item * kRows; row < std::min(rows, (item + 1) * kRows); ++row) sum_share(row, joins);
    });
  }

  // For LoRA of down: d_low = scale * dy B, and shared = share * low.
  void go_back_down(int64_t expert) const {
    const ckdist_expert_low_grad& low = step.low[kDown];
    const int64_t rank = r.width(low.low);
    const Matrix b = parts.pack_transposed({low.b, expert * hidden, hidden, 0, rank}, own.tiles);
    each_gathered(expert, step.dy, [&](int64_t first, int64_t rows, const Operand& dy) {
      store_low(b, first, rows, dy, low.d_low);
      for (int64_t row = first; row < first + rows; ++row) {
        r.kernels.row.scale(r.row(low.low, row), share(row), rank, r.row(low.shared, row));
        r.pad(low.shared, row);
      }
    });
  }
  // For LoRA of gate or up: d_low = scale * d B, where `d` is the gradient of gate or up.
  void go_back_up(int64_t expert, const ckdist_expert_low_grad& low, int d) const {
    if (low.a < 0) return;
    const Matrix b = parts.pack_transposed({low.b, expert * ffn, ffn, 0, r.width(low.low)}, own.tiles);
    each_row(expert, d,
             [&](int64_t first, int64_t rows, const Operand& x) { store_low(b, first, rows, x, low.d_low); });
  }

  // Computes d_gate and d_up of a slice from the gradient of the expert's output. Also computes joined = share *
  // joined, and the slice's part of the gradient of the shares.
  void unjoin(int64_t expert, int64_t number, int64_t count, const Slice& s) const {
    const auto function = GateFunction(step.function);
    const Matrix down =
                     parts.pack_transposed({step.down_weight, expert * hidden, hidden, s.begin, s.columns}, own.tiles),
                 down_a = pack_a_transposed(step.low[kDown], expert, s, own.low[0]);
    const float* const down_bias = number == 0 ? bias(step.down_bias, expert, 0) : nullptr;
    each_gathered(expert, step.dy, [&](int64_t first, int64_t rows, const Operand& dy) {
      multiply(down, dy, rows, own.a, s.stride);
      add_low(down_a, step.low[kDown].d_low, first, rows, own.a, s.stride);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = first + i;
        const Row d = float_row(own.a + i * s.stride), joined = float_row(own.b), gate = part(step.gate, row, s.begin),
                  up = part(step.up, row, s.begin);
        r.kernels.row.gated(function, gate, up, s.columns, joined);
        of_shares[row * count + number] = r.kernels.row.dot(joined, d, s.columns);
        if (down_bias != nullptr)
          of_shares[row * count] += r.kernels.row.dot(float_row(down_bias), r.row(step.dy, groups.tokens[row]), hidden);
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
                   up = parts.pack_transposed({step.up_weight, expert * ffn, ffn, s.begin, s.columns}, own.second),
                   gate_a = pack_a_transposed(step.low[kGate], expert, s, own.low[0]),
                   up_a = pack_a_transposed(step.low[kUp], expert, s, own.low[1]);
      for (int64_t row = groups.starts[expert]; row < end; row += kRows) {
        const int64_t rows = std::min(kRows, end - row);
        multiply(gate, r.operand(step.d_gate, row), rows, own.a, s.stride);
        multiply(up, r.operand(step.d_up, row), rows, own.a, s.stride, true);
        add_low(gate_a, step.low[kGate].d_low, row, rows, own.a, s.stride);
        add_low(up_a, step.low[kUp].d_low, row, rows, own.a, s.stride);
        for (int64_t i = 0; i < rows; ++i)
          r.kernels.elementwise.add(own.a + i * s.stride, s.columns,
                                    r.floats(step.dx, groups.tokens[row + i]) + s.begin);
      }
    }
  }

  // One factor of an expert's weight gradients: a value's rows, indexed by row or by the row's token.
  struct Factor {
    int32_t value;
    bool by_token;
  };
  Matrix transpose(const Factor& f, int64_t row, int64_t rows, int64_t column, int64_t columns, uint8_t* tiles,
                   uint8_t* narrow) const {
    return parts.transpose(f.value, f.by_token ? groups.tokens + row : nullptr, row, rows, column, columns, tiles,
                           narrow);
  }

  // Gradients of up to two matrices of an expert, (height, width). They share the factor x, which has `width` columns.
  struct Outer {
    Factor x;
    int64_t width, height;
    int32_t gradients[2];
    Factor ys[2];
  };
  int64_t items_of(const Outer& o) const { return step.experts * slices(o.width, PartProducts::kOuterTiles); }
  // One item of the gradients, a slice of their columns for one expert: gradient = y^T x, summed over the expert's
  // rows.
  void add(const Outer& o, int64_t item) const {
    const int64_t count = slices(o.width, PartProducts::kOuterTiles), expert = item / count;
    const Slice s = slice(o.width, PartProducts::kOuterTiles, item % count);
    Carver c{r.memory(thread)};
    const OuterRoom own_outer = outer_room(c, r, step);
    const bool adds = r.adds(step.fresh);
    const auto place = [&](int n) {
      const int64_t width = r.shape(o.gradients[n]).cols;
      return r.gradient(o.gradients[n]) + expert * o.height * width + s.begin;
    };
    for (int n = 0; n < 2 && groups.rows(expert) == 0 && !adds; ++n)
      for (int64_t i = 0; i < o.height && o.gradients[n] >= 0; ++i)
        std::fill_n(place(n) + i * r.shape(o.gradients[n]).cols, s.columns, 0.f);
    for (int64_t row = groups.starts[expert]; row < groups.starts[expert + 1]; row += kOuterColumns) {
      const int64_t rows = std::min(kOuterColumns, groups.starts[expert + 1] - row);
      const Matrix of_x = transpose(o.x, row, rows, s.begin, s.columns, own_outer.x, own_outer.narrow);
      for (int n = 0; n < 2; ++n)
        for (int64_t i = 0; i < o.height && o.gradients[n] >= 0; i += PartProducts::kOuterRows) {
          const Matrix y = transpose(o.ys[n], row, rows, i, std::min(PartProducts::kOuterRows, o.height - i),
                                     own_outer.y, own_outer.narrow);
          const int64_t width = r.shape(o.gradients[n]).cols;
          parts.outer(y, of_x, place(n) + i * width, width, adds || row > groups.starts[expert]);
        }
    }
  }
  int list_outers(Outer* to) const {
    int count = 0;
    const auto list = [&](const Outer& o) {
      if (o.gradients[0] >= 0 || o.gradients[1] >= 0) to[count++] = o;
    };
    const Factor x{step.x, true}, dy{step.dy, true}, joined{step.joined, false};
    const Factor d[] = {{step.d_gate, false}, {step.d_up, false}};
    list({x, hidden, ffn, {step.gate_gradient, step.up_gradient}, {d[kGate], d[kUp]}});
    list({joined, ffn, hidden, {step.down_gradient, -1}, {dy, dy}});
    for (const int at : {kGate, kUp, kDown}) {
      const ckdist_expert_low_grad& low = step.low[at];
      if (low.a < 0) continue;
      const bool is_down = at == kDown;
      const Factor made{is_down ? low.shared : low.low, false}, d_low{low.d_low, false}, out = is_down ? dy : d[at];
      list({is_down ? joined : x, is_down ? ffn : hidden, r.width(low.low), {low.a_gradient, -1}, {d_low, d_low}});
      list({made, r.width(low.low), is_down ? hidden : ffn, {low.b_gradient, -1}, {out, out}});
    }
    return count;
  }

  // Gradients of an expert's biases. For gate and up only this rank's columns; the others are zero.
  void add_biases(int64_t expert) const {
    Carver c{r.memory(thread)};
    float* const row = outer_room(c, r, step).row;
    const auto sum = [&](int32_t gradient, int64_t column, int64_t n, auto&& read) {
      if (gradient < 0) return;
      const int64_t all = r.shape(gradient).cols / step.experts;
      float* const to = r.gradient(gradient) + expert * all;
      if (!r.adds(step.fresh)) std::fill_n(to, all, 0.f);
      for (int64_t at = groups.starts[expert]; at < groups.starts[expert + 1]; ++at) {
        read(at);
        r.kernels.elementwise.add(row, n, to + column);
      }
    };
    const Row to = float_row(row);
    sum(step.gate_bias_gradient, step.bias_column, ffn,
        [&](int64_t at) { r.kernels.row.scale(r.row(step.d_gate, at), 1.f, ffn, to); });
    sum(step.up_bias_gradient, step.bias_column, ffn,
        [&](int64_t at) { r.kernels.row.scale(r.row(step.d_up, at), 1.f, ffn, to); });
    sum(step.down_bias_gradient, 0, hidden,
        [&](int64_t at) { r.kernels.row.scale(r.row(step.dy, groups.tokens[at]), share(at), hidden, to); });
  }
};

const RegisteredKind<GroupedExperts> kGroupedExperts(ckdist_step_grouped_experts);
const RegisteredKind<GroupedExpertsGrad> kGroupedExpertsGrad(ckdist_step_grouped_experts_grad);

}  // namespace
}  // namespace ckdist
