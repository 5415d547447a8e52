// The mixture of experts: chooses experts, and computes gate, up and down of each expert for all of its rows.
//
// One step and one barrier for any number of experts. First threads take pieces of gate and up of all chosen experts,
// laid end to end. The thread that completes an expert computes the input activations of its down projection. Then
// threads take columns of the output, each over all experts in order, and wait only for an expert that is not complete.
// So each weight is read once for all rows of its expert, and a token's sum has one order in any batch.
#include "runtime/scalars.h"
#include "runtime/shares.h"
#include "runtime/steps/low_rank.h"
#include "runtime/steps/packed_weight.h"
#include "runtime/steps/residual.h"
#include "runtime/steps/routing.h"

namespace ckdist {
namespace {

constexpr int64_t kGatheredBytes = 512 << 10;  // bytes of activations whose rows are gathered
constexpr int64_t kScratchFloats = 32 << 10;
constexpr int64_t kExpertRows = 64;         // rows of a product at a time, if there are many
constexpr int64_t kPromptRows = 256;        // the same for prompts, whose weights are expanded for each block
constexpr int64_t kBlockBytes = 256 << 10;  // bytes of weights at a time, if there are many rows
constexpr int64_t kBlockTiles = 6;          // minimum number of tiles for kBlockBytes
constexpr int64_t kLeastRows = 4;           // fewer rows cost the same
constexpr int64_t kDownTiles = 8;           // output tiles at a time for few rows: long runs of memory of each expert
constexpr int64_t kLeastUnits = 8;          // units of output tiles for each of many threads; else a unit is smaller
constexpr int64_t kLowRows = 256;           // rows at a time of products with matrices A of LoRA

struct Experts : Carved<Experts, InferenceRun<ckdist_experts_step>> {
  using Set = ckdist_expert_set;

  struct Room {
    uint8_t* gathered;
    float *scratch, *sums, *logits, *low;  // low: rows times the matrices A of gate and up, side by side
    LowRankSum low_sum;
    Choice choice;  // for few rows: every thread computes it itself
    Grouping grouping;
  };
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    int64_t row = 0, low = 0;
    for (int i = 0; i < kExpertInputs * step.count; i++)
      if (const int x = expert_input(step, i); x >= 0) row = std::max(row, r.value(x).stride);
    for (int s = 0; s < step.count; s++) low = std::max(low, low_width(r, step.sets[s]));
    const int64_t tokens = r.program.max_tokens, sums = step.sets[0].gate.count > 1 ? tokens * sum_columns(tokens) : 0;
    return {c.bytes(std::max(kGatheredBytes, row)),
            c.floats(scratch_floats(r)),
            c.floats(sums),
            c.floats(r.value(step.logits).width * 2 + 2 * step.routing.groups),
            c.floats(kLowRows * low),
            low > 0 || has_low(step) ? LowRankSum::carve(c) : LowRankSum{},
            Choice::carve(c, Inference::kReplicatedRows, step.routing.used),
            Grouping::carve(c, Inference::kReplicatedRows, step)};
  }
  // Products of a block before they are joined or added.
  static int64_t scratch_floats(const Inference& r) {
    return r.plan->prompts ? 2 * kPromptRows * kPromptTiles * kTileRows : kScratchFloats;
  }
  static bool has_low(const Fields& step) {
    return std::any_of(step.sets, step.sets + step.count, [](const Set& set) { return set.down_low.a.count > 0; });
  }
  // Columns of the products with the matrices A of gate and up.
  static int64_t low_width(const Inference& r, const Set& set) {
    return a_columns(r, set, set.gate_low) + a_columns(r, set, set.up_low);
  }
  static int64_t a_columns(const Inference& r, const Set& set, const ckdist_low_rank& low) {
    return low.a.count > 0 ? tiles_each(r, set, low.a.first) * kTileRows : 0;
  }
  // Tiles of one expert in a stack.
  static int64_t tiles_each(const Inference& r, const Set& set, int32_t matrix) {
    return r.matrix(matrix).tile_count() / set.count;
  }
  int64_t tiles_each(const Set& set, int32_t matrix) const { return tiles_each(r, set, matrix); }
  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return carved_bytes([&](Carver& c) { shared(c, r, step); });
  }
  // In the workspace, for rows that threads divide.
  struct Shared {
    Choice choice;
    Grouping grouping;
    ExpertExchange exchange;
  };
  static Shared shared(Carver& c, const Inference& r, const Fields& step) {
    return {Choice::carve(c, r.program.max_tokens, step.routing.used), Grouping::carve(c, r.program.max_tokens, step),
            ExpertExchange::carve(c, r, step)};
  }
  // Columns of the output at a time if the shards of ranks are summed.
  static int64_t sum_columns(int64_t rows) { return rows > 64 ? 128 : 1024; }

  void run() {
    shared_out = step.step.rows == ckdist_rows_host;
    n = shared_out ? r.local_tokens : r.rows(step.step);  // includes rows of other hosts
    if (n > 0) {
      own = buffers();
      number = r.step_number(index);
      few = n <= Inference::kFewRows;
      group();
      if (thread == 0) r.count_experts(bytes_read());
      each_piece(up_cost(), longest_up(), 0,
                 [&](int64_t from, int64_t to, int64_t piece) { multiply_up(from, to, piece); });
      const int64_t least = r.active() > kSixteen ? kLeastUnits * r.active() : 1;
      const int64_t tiles = down_tiles(), unit = few ? std::clamp<int64_t>(tiles / least, 1, kDownTiles) : 1,
                    units = (tiles + unit - 1) / unit, cost = down_cost() * unit;
      const auto at = [&](int64_t cost_before, int64_t piece) {
        return std::min(boundary(cost_before, cost, units, piece, r.active()) * unit, tiles);
      };
      if (cost > 0)
        each_piece(cost * units, cost, 1,
                   [&](int64_t from, int64_t to, int64_t piece) { multiply_down({at(from, piece), at(to, piece)}); });
      else clear();
    }
    if (!shared_out) return r.finish(thread, index, step.out, n);
    r.count_step(thread);
    StepTeam team(r, thread, index);
    if (n > 0) exchange.combine(team, r, step, index);
    else team.meet();
  }

 private:
  // Chooses the experts of each row and groups the rows by expert.
  void group() {
    if (n <= Inference::kReplicatedRows && !shared_out) {
      choice = own.choice, grouping = own.grouping;
      for (int64_t row = 0; row < n; row++) choose(row);
      grouping.make(step, choice, n);
      if (thread == 0) count_rows();
      return;
    }
    Carver c{r.workspace()};
    const Shared those = shared(c, r, step);
    choice = those.choice, grouping = those.grouping, exchange = those.exchange;
    const int64_t first = r.first_row(step.step);
    each_row(r.rows(step.step), [&](int64_t row) { choose(first + row); });
    if (shared_out) {
      StepTeam team(r, thread, index);
      exchange.dispatch(team, r, step, choice, index);
    }
    r.meet(thread, index, false, [&](Idle) {
      grouping.make(step, choice, n);
      count_rows();
    });
  }

  void count_rows() const {
    int64_t* const counters = r.expert_counters(step.layer);
    for (int64_t row = 0; counters != nullptr && row < n; row++)
      for (int slot = 0; slot < step.routing.used; slot++) counters[choice.experts(row)[slot]]++;
  }

  void choose(int64_t row) {
    const FloatRows logits = r.floats(step.logits);
    const float* const correction = step.correction >= 0 ? r.vector(step.correction) : nullptr;
    const float* given = nullptr;
    if (step.experts_of >= 0) {
      const int32_t id = r.batch.token_ids[r.batch_token(step.step, row - r.first_row(step.step))];
      given = r.vector(step.experts_of) + std::max(id, 0) * step.routing.used;
    }
    choose_experts(r.kernels, step.routing, logits.row(row), r.value(step.logits).width, correction, given, own.logits,
                   choice.experts(row), choice.shares(row));
    if (step.share_factors >= 0)
      for (int slot = 0; slot < step.routing.used; slot++)
        choice.shares(row)[slot] *= r.vector(step.share_factors)[choice.experts(row)[slot]];
    choice.all(row) = step.switches < 0 ? 1.f : sigmoid(*r.floats(step.switches).row(row));
  }

  // Runs work(from, to, bytes of a piece) for the pieces of a phase that this thread takes. `tile`: cost of a tile.
  template <class Work>
  void each_piece(int64_t cost, int64_t tile, int phase, Work&& work) {
    const Shares shares(cost, tile, r.active(), few);
    if (cost == 0) return;
    const auto take = [&](int64_t piece) { work(shares.begin(piece), shares.begin(piece + 1), shares.first()); };
    take(thread);
    r.take_items(thread, index, shares.pieces() - r.active(), [&](int64_t i) { take(r.active() + i); }, phase);
  }

  const Set& set_of(const ExpertRows& g) const { return step.sets[g.set]; }
  // Bytes of the weights of all chosen experts.
  int64_t bytes_read() const {
    int64_t bytes = 0;
    const auto add = [&](const Set& set, ckdist_span span) {
      for (int m = span.first; m < span.first + span.count; m++) bytes += tiles_each(set, m) * r.matrix(m).tile_bytes;
    };
    for (int64_t i = 0; i < *grouping.count; i++) {
      const Set& set = set_of(grouping.groups[i]);
      add(set, set.gate), add(set, set.up), add(set, set.down);
      for (const ckdist_low_rank* low : {&set.gate_low, &set.up_low, &set.down_low}) add(set, low->a), add(set, low->b);
    }
    return bytes;
  }
  // Calls visit(group, shard) for the shards of all groups.
  template <class Visit>
  void each_shard(Visit&& visit) const {
    for (const ExpertRows* g = grouping.groups; g != grouping.groups + *grouping.count; g++)
      for (int s = 0; s < set_of(*g).gate.count; s++) visit(*g, s);
  }
  static int64_t rows_cost(const ExpertRows& g) { return std::max(g.rows, kLeastRows); }
  int64_t up_tile_cost(const ExpertRows& g, int shard) const {
    const Set& set = set_of(g);
    return (r.matrix(set.gate.first + shard).tile_bytes + r.matrix(set.up.first + shard).tile_bytes) * rows_cost(g);
  }
  int64_t up_cost() const {
    int64_t cost = 0;
    each_shard([&](const ExpertRows& g, int s) {
      cost += up_tile_cost(g, s) * tiles_each(set_of(g), set_of(g).gate.first + s);
    });
    return cost;
  }
  int64_t longest_up() const {
    int64_t cost = 0;
    for (int64_t i = 0; i < *grouping.count; i++) cost = std::max(cost, up_tile_cost(grouping.groups[i], 0));
    return cost;
  }
  // Cost of one tile of the output, over all experts.
  int64_t down_cost() const {
    int64_t cost = 0;
    each_shard(
        [&](const ExpertRows& g, int s) { cost += r.matrix(set_of(g).down.first + s).tile_bytes * rows_cost(g); });
    return cost;
  }
  int64_t down_tiles() const { return (r.value(step.out).width + kTileRows - 1) / kTileRows; }

  // Computes gate and up for the tiles in [from, to) of the experts' costs laid end to end.
  void multiply_up(int64_t from, int64_t to, int64_t piece) {
    int64_t offset = 0;
    for (int64_t i = 0; i < *grouping.count && offset < to; i++) {
      const ExpertRows& g = grouping.groups[i];
      const Set& set = set_of(g);
      int64_t column = 0, done = 0, total = 0;
      for (int s = 0; s < set.gate.count; s++) {
        const int64_t cost = up_tile_cost(g, s), tiles = tiles_each(set, set.gate.first + s);
        const Range part = {boundary(from - offset, cost, tiles, piece, r.active()),
                            boundary(to - offset, cost, tiles, piece, r.active())};
        if (part.begin < part.end) join(g, s, column, part);
        done += part.end - part.begin, total += tiles;
        offset += cost * tiles;
        column += r.value(set.activations.first + s).floats;
      }
      if (done > 0 && int64_t(r.counter(int(i)).add(number, uint32_t(done))) + done == total) {
        prepare(g);
        r.counter(int(i)).add(number, 1);
      }
    }
  }
  bool complete(int64_t group) {
    const ExpertRows& g = grouping.groups[group];
    int64_t total = 0;
    for (int s = 0; s < set_of(g).gate.count; s++) total += tiles_each(set_of(g), set_of(g).gate.first + s);
    return total == 0 || r.counter(int(group)).get(number) == total + 1;
  }

  // The activations of an expert's rows, consecutive: in place, or gathered.
  const uint8_t* inputs(const ExpertRows& g, int x, Range rows) {
    const int64_t stride = r.value(x).stride;
    const uint8_t* const from = shared_out ? r.step_activations(x) : r.activations(thread, step.step, x);
    if (g.set == 1) return from + rows.begin * stride;
    const int32_t* const tokens = grouping.tokens + g.first;
    if (rows.end - rows.begin == 1) return from + tokens[rows.begin] * stride;
    for (int64_t row = rows.begin; row < rows.end; row++)
      std::copy(from + tokens[row] * stride, from + (tokens[row] + 1) * stride,
                own.gathered + (row - rows.begin) * stride);
    return own.gathered;
  }

  // joined = gate * up for tiles of shard s of one expert. The shard's first row is column `column` of `joined`.
  void join(const ExpertRows& g, int s, int64_t column, Range tiles) {
    const Set& set = set_of(g);
    const bool same = set.gate_x == set.up_x;  // the same format
    const int64_t x_stride = r.value(set.gate_x).stride;
    const int64_t few_rows = set.low_x < 0 ? g.rows : std::min(g.rows, kLowRows);
    const int64_t most = g.set == 1 ? few_rows : std::min(few_rows, rows_gathered(set.gate_x));
    const FloatRows joined = r.floats(set.joined);  // (rows of all groups, ffn columns)
    for (int64_t row = 0; row < g.rows; row += most) {
      const Range chunk = {row, std::min(row + most, g.rows)};
      make_low(g, chunk);
      const uint8_t* const x = same ? inputs(g, set.gate_x, chunk) : nullptr;
      const int64_t block_rows = r.plan->prompts ? kPromptRows : kExpertRows;
      const int64_t rows_each = few ? chunk.end - chunk.begin : std::min(block_rows, chunk.end - chunk.begin);
      const int64_t pair_bytes = r.matrix(set.gate.first + s).tile_bytes + r.matrix(set.up.first + s).tile_bytes;
      int64_t tiles_each = std::max<int64_t>(scratch_floats(r) / 2 / kTileRows / rows_each, 1);
      if (!few) tiles_each = std::min(tiles_each, tiles_at_once(kBlockBytes, pair_bytes, kBlockTiles));
      for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_each) {
        const Range some = {tile, std::min(tile + tiles_each, tiles.end)};
        for (int64_t at = chunk.begin; at < chunk.end; at += rows_each) {
          const Range block = {at, std::min(at + rows_each, chunk.end)};
          const uint8_t* const block_x = same ? x + (at - chunk.begin) * x_stride : inputs(g, set.gate_x, block);
          join_block(g, s, column, some, block_x, block, at - chunk.begin, joined.row(g.first + at) + column,
                     joined.stride);
        }
      }
    }
  }

  // Number of rows that are gathered at a time.
  int64_t rows_gathered(int x) const { return std::max<int64_t>(kGatheredBytes / r.value(x).stride, 1); }

  // Multiplies at most kLowRows rows of an expert by the matrices A of gate and up.
  void make_low(const ExpertRows& g, Range rows) {
    const Set& set = set_of(g);
    if (set.low_x < 0) return;
    const int64_t most = g.set == 1 ? kLowRows : rows_gathered(set.low_x), width = low_width(r, set),
                  stride = r.value(set.low_x).stride;
    for (int64_t row = rows.begin; row < rows.end; row += most) {
      const Range some = {row, std::min(row + most, rows.end)};
      const uint8_t* const x = inputs(g, set.low_x, some);
      float* y = own.low + (row - rows.begin) * width;
      for (const ckdist_low_rank* low : {&set.gate_low, &set.up_low}) {
        if (low->a.count == 0) continue;
        product(g, low->a.first, {0, tiles_each(set, low->a.first)}, x, stride, some.end - some.begin, y, width);
        y += a_columns(r, set, *low);
      }
    }
  }

  // y += x * B^T for tiles of an expert's matrix B.
  void add_low(const ExpertRows& g, int b, Range tiles, int64_t columns, const float* x, int64_t x_stride, int64_t rows,
               float* y, int64_t stride) const {
    const int64_t before = g.expert * tiles_each(set_of(g), b);
    own.low_sum.add(r.kernels, r.matrix(b), {before + tiles.begin, before + tiles.end}, columns, x, x_stride, rows, y,
                    stride);
  }

  // `low_row`: index in own.low of the first of the rows.
  void join_block(const ExpertRows& g, int s, int64_t column, Range tiles, const uint8_t* x, Range rows,
                  int64_t low_row, float* joined, int64_t stride) {
    const Set& set = set_of(g);
    const int64_t width = r.value(set.activations.first + s).floats;  // columns of the shard
    const int64_t from = tiles.begin * kTileRows, columns = std::min(tiles.end * kTileRows, width) - from,
                  scratch_stride = (tiles.end - tiles.begin) * kTileRows, count = rows.end - rows.begin;
    const int64_t x_stride = r.value(set.gate_x).stride;
    float *const gate = own.scratch, *const up = gate + scratch_floats(r) / 2;  // (count, scratch_stride)
    product(g, set.gate.first + s, tiles, x, x_stride, count, gate, scratch_stride);
    const bool one = set.gate.first == set.up.first;  // experts without gates: f(up) * up
    if (one) {
      std::copy(gate, gate + count * scratch_stride, up);
    } else {
      if (set.up_x != set.gate_x) x = inputs(g, set.up_x, rows);
      product(g, set.up.first + s, tiles, x, r.value(set.up_x).stride, count, up, scratch_stride);
    }
    if (set.low_x >= 0) {
      const int64_t low_stride = low_width(r, set), of_gate = a_columns(r, set, set.gate_low);
      const float* const low = own.low + low_row * low_stride;
      if (of_gate > 0)
        add_low(g, set.gate_low.b.first + s, tiles, columns, low, low_stride, count, gate, scratch_stride);
      if (set.up_low.a.count > 0)
        add_low(g, set.up_low.b.first + s, tiles, columns, low + of_gate, low_stride, count, up, scratch_stride);
    }
    for (int64_t row = 0; step.shares_input != 0 && g.set == 0 && row < count; row++) {
      const float share = grouping.shares[g.first + rows.begin + row];
      for (float* const of : {gate, up}) scaled(of + row * scratch_stride, share, columns, of + row * scratch_stride);
    }
    const int64_t bias = g.expert * set.bias_width + set.bias_column + column + from;
    add_bias(set.gate_bias, bias, columns, count, gate, scratch_stride);
    add_bias(set.up_bias, bias, columns, count, up, scratch_stride);
    for (int64_t row = 0; row < count; row++)
      r.kernels.elementwise.gated(GateFunction(set.function), gate + row * scratch_stride, up + row * scratch_stride,
                                  columns, joined + row * stride + from);
  }

  // Multiplies rows of x by tiles of one expert's matrix. y[row][0] belongs to the first row of the first tile.
  void product(const ExpertRows& g, int matrix, Range tiles, const uint8_t* x, int64_t x_stride, int64_t rows, float* y,
               int64_t stride) {
    const int64_t before = g.expert * tiles_each(set_of(g), matrix);
    each_packed(r, thread, r.weight(matrix), before + tiles.begin, before + tiles.end,
                [&](const Matrix& part, int64_t first) {
                  r.multiply(thread, part, x, x_stride, rows, y + (first - before - tiles.begin) * kTileRows, stride);
                });
  }

  // Adds `columns` floats of a vector, from index `at` on, to each of `count` rows. No-op if the vector is absent.
  void add_bias(int32_t vector, int64_t at, int64_t columns, int64_t count, float* rows, int64_t stride) {
    for (int64_t row = 0; vector >= 0 && row < count; row++)
      r.kernels.elementwise.add(r.vector(vector) + at, columns, rows + row * stride);
  }

  // Computes the input activations of an expert's down projection, and their product with its matrix A of LoRA.
  void prepare(const ExpertRows& g) {
    const Set& set = set_of(g);
    prepare(g, set.activations);
    if (set.down_low.a.count == 0) return;
    prepare(g, set.low_activations);
    const FloatRows low = r.floats(set.low);
    for (int s = 0; s < set.down_low.a.count; s++) {
      const int x = set.low_activations.first + s, a = set.down_low.a.first + s;
      const int64_t bytes = r.value(x).stride;
      if (r.matrix(a).cols > 0)
        product(g, a, {0, tiles_each(set, a)}, r.step_activations(x) + g.first * bytes, bytes, g.rows,
                low.row(g.first) + s * a_columns(r, set, set.down_low), low.stride);
    }
  }

  // Converts `joined` to the activation format of each shard.
  void prepare(const ExpertRows& g, const ckdist_span& shards) {
    int64_t column = 0;
    const FloatRows joined = r.floats(set_of(g).joined);
    for (int x = shards.first; x < shards.first + shards.count; x++) {
      const ckdist_value& a = r.value(x);
      const int64_t bytes = a.stride;
      uint8_t* const out = r.step_activations(x) + g.first * bytes;
      for (int64_t row = 0; a.width > 0 && row < g.rows; row++)
        r.kernels.elementwise.prepare(ActivationFormat(a.format), joined.row(g.first + row) + column, a.floats, a.lead,
                                      a.width, out + row * bytes);
      column += a.floats;
    }
  }

  // Computes the columns of the output that belong to tiles of the down projection.
  void multiply_down(Range tiles) {
    const int shards = step.sets[0].down.count;
    const int64_t tiles_each = (shards > 1 ? sum_columns(n) : few ? 1024 : 128) / kTileRows;
    const auto [out, stride] = r.floats(step.out);
    for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_each) {
      const Range some = {tile, std::min(tile + tiles_each, tiles.end)};
      const int64_t from = some.begin * kTileRows,
                    columns = std::min(some.end * kTileRows, r.value(step.out).width) - from;
      for (int s = 0; s < shards; s++) {
        float* const y = s == 0 ? out + from : own.sums;
        const int64_t y_stride = s == 0 ? stride : columns;
        for (int64_t row = 0; row < n; row++) std::fill(y + row * y_stride, y + row * y_stride + columns, 0.f);
        for (int64_t i = 0; i < *grouping.count; i++) add_expert(i, s, some, columns, y, y_stride);
        for (int64_t row = 0; s > 0 && row < n; row++)
          r.kernels.elementwise.add(own.sums + row * columns, columns, out + row * stride + from);
      }
    }
  }

  // y += share * (tiles of shard s of an expert's down projection), for the expert's rows.
  void add_expert(int64_t group, int s, Range tiles, int64_t columns, float* y, int64_t y_stride) {
    const ExpertRows& g = grouping.groups[group];
    const Set& set = set_of(g);
    if (s >= set.down.count || r.matrix(set.down.first + s).cols == 0) return;
    r.wait_until([&] { return complete(group); });
    const int x = set.activations.first + s;
    const int64_t x_stride = r.value(x).stride, width = (tiles.end - tiles.begin) * kTileRows;
    const uint8_t* const in = r.step_activations(x) + g.first * x_stride;
    const int64_t rows_each = std::max<int64_t>(scratch_floats(r) / width, 1);
    for (int64_t row = 0; row < g.rows; row += rows_each) {
      const int64_t count = std::min(rows_each, g.rows - row);
      product(g, set.down.first + s, tiles, in + row * x_stride, x_stride, count, own.scratch, width);
      if (set.down_low.a.count > 0) {
        const FloatRows low = r.floats(set.low);
        add_low(g, set.down_low.b.first, tiles, columns, low.row(g.first + row) + s * a_columns(r, set, set.down_low),
                low.stride, count, own.scratch, width);
      }
      if (s == set.biased)
        add_bias(set.down_bias, g.expert * r.value(step.out).width + tiles.begin * kTileRows, columns, count,
                 own.scratch, width);
      for (int64_t i = 0; i < count; i++) {
        const int64_t token = g.set == 1 ? row + i : grouping.tokens[g.first + row + i];
        const float share = g.set == 1               ? choice.all(token)
                            : step.shares_input != 0 ? 1.f
                                                     : grouping.shares[g.first + row + i];
        r.kernels.elementwise.add_scaled(own.scratch + i * width, share, columns, y + token * y_stride);
      }
    }
  }

  // Writes zeros if this rank has no part of the chosen experts.
  void clear() {
    const FloatRows out = r.floats(step.out);
    for (int64_t row = thread; row < n; row += r.active()) std::fill_n(out.row(row), r.value(step.out).width, 0.f);
  }

 public:
  int64_t n = 0;
  bool few = false, shared_out = false;
  uint32_t number = 0;
  Room own{};
  Choice choice{};
  Grouping grouping{};
  ExpertExchange exchange{};
};

const RegisteredKind<Experts> kExperts(ckdist_step_experts);

}  // namespace
}  // namespace ckdist
