// Products of one input with several matrices, with their biases, low-rank additions, gate and soft cap.
#include "runtime/shares.h"
#include "runtime/steps/low_rank.h"
#include "runtime/steps/packed_weight.h"

namespace ckdist {
namespace {

constexpr int64_t kExpandedRows = 256;  // minimum rows for which weights of prompts are expanded
// Bytes of a product's weights that a thread takes at a time. It fits the L2 cache of CPUs with AMX, whose kernels are
// fast for many rows. On other CPUs it made no difference.
constexpr int64_t kPieceBytes = 1536 << 10, kLeastPieces = 4;
constexpr int64_t kLeastTiles = 12;  // minimum tiles of a product at a time, because kernels are fast for many
// Rows, and bytes of both weights, of a gated product at a time. They stay in the L2 cache.
constexpr int64_t kGatedRows = 256, kGatedBytes = 512 << 10;
// Fewest rows of an item that is a part of the rows, and its most tiles; of rows in strips, too.
constexpr int64_t kBlockRows = 128, kItemTiles = 8, kPromptItemRows = 256, kPromptItemTiles = kPromptTiles;
constexpr int64_t kPairs = INT64_MAX;       // of `boundary`: pieces are pairs of tiles
constexpr int64_t kAheadBytes = 256 << 10;  // bytes of a product's weights that are prefetched
// Tokens and tiles of a summed product at a time. The result stays in the L2 cache.
constexpr int64_t kSummedTokens = 256, kSummedPrompts = 512, kSummedTiles = 8;
// Tiles of few rows at a time, if their columns are divided: a single tile is read from beginning to end. A thread then
// reads as fast as without parts (22.7 to 24.4 of 24.5 GB/s on Zen 4; with two tiles 17 to 19).
constexpr int64_t kStreamedTiles = 1;
constexpr int64_t kCellFloats = Inference::kFewRows * kTileRows;

struct Linear : Carved<Linear, InferenceRun<ckdist_linear_step>> {
  using Product = ckdist_product;
  static constexpr bool kReadsAhead = true;

  void run() {
    const int64_t n = r.rows(step.step), bytes = weight_bytes(r, step);
    const Groups groups(r, step, n);
    if (n > 0 && bytes > 0) {
      const bool strips = r.in_strips(step.step, step.products[0].x.first);
      // If rows were divided, every thread would pack, expand or read all weights.
      if (n >= Inference::kThreadRows * r.active() && !r.packing && !r.plan->prompts && !strips) {
        const int64_t each = std::max(kPieceBytes, kLeastTiles * longest_tile());
        const int64_t pieces = std::max((bytes + each - 1) / each, kLeastPieces), own = pieces * groups.count;
        r.for_each_item(thread, index, own * r.active(), [&](int64_t item) {
          const int group = int(item % own / pieces);
          const Range rows = groups.rows(group), part = strips_of(int(item / own), rows.end - rows.begin);
          const int64_t piece = item % pieces;
          multiply_bytes(bytes * piece / pieces, bytes * (piece + 1) / pieces, bytes / pieces,
                         {rows.begin + part.begin, rows.begin + part.end});
          end_item(groups, group, pieces * r.active());
        });
      } else if (n >= kBlockRows && r.active() > 1 && !r.packing && (strips || !r.plan->prompts) && groups.count == 1) {
        const Blocks blocks(bytes, piece_bytes(r, step, false), r.active(), n, strips ? kPromptItemRows : kBlockRows,
                            strips ? kPromptItemTiles : kItemTiles);
        multiply_bytes(blocks.begin(thread), blocks.end(thread), kPairs, {0, n});
        r.take_items(thread, index, blocks.items(), [&](int64_t i) {
          multiply_bytes(blocks.item_begin(i), blocks.item_end(i), kPairs, {blocks.first_row(i), blocks.end_row(i)});
        });
      } else if (divides_columns(r, step, n)) {
        multiply_cells(bytes, n);
      } else {
        const Shares shares(bytes, piece_bytes(r, step, false), r.active(), n <= Inference::kFewRows);
        const int64_t pieces = shares.pieces();
        const auto take = [&](int64_t item) {
          const int64_t piece = item % pieces;
          multiply_bytes(shares.begin(piece), shares.begin(piece + 1), shares.first(), groups.rows(int(item / pieces)));
          end_item(groups, int(item / pieces), pieces);
        };
        take(thread);
        r.take_items(thread, index, pieces * groups.count - r.active(), [&](int64_t i) { take(r.active() + i); });
      }
    }
    if (bytes == 0) clear(n);
    r.finish(thread, index, step.products[0].out, n);
  }

  // Groups of rows that are computed one after another, so that the sum of a group travels between hosts while the
  // next is computed. A group has one or more chunks of that sum, and enough rows for fast products.
  struct Groups {
    int count = 1;
    Inference::SumChunks chunks;

    Groups(const Inference& r, const Fields& step, int64_t n) : chunks(r.sum_chunks(step.products[0].out)) {
      if (chunks.rows != n || r.packing) chunks = {1, n};
      if (chunks.count == 1) return;
      const int64_t least = r.plan->prompts                           ? kExpandedRows
                            : n < Inference::kThreadRows * r.active() ? Inference::kThreadRows
                                                                      : Inference::kThreadRows * r.active();
      count = int(std::clamp<int64_t>(n / least, 1, chunks.count));
    }
    int first_chunk(int group) const { return chunks.count * group / count; }
    Range rows(int group) const { return {chunks.begin(first_chunk(group)), chunks.begin(first_chunk(group + 1))}; }
  };

  // A thread's part of n rows, in multiples of a strip's rows.
  Range strips_of(int part, int64_t n) const {
    constexpr int64_t unit = ActivationRow::kStripRows;
    const Range own = r.part_of(part, (n + unit - 1) / unit);
    return {own.begin * unit, std::min(own.end * unit, n)};
  }

  // Counts an item of a group. The first thread begins to sum the groups that are complete.
  void end_item(const Groups& groups, int group, int64_t items) {
    if (groups.count == 1) return;
    const uint32_t number = r.step_number(index);
    r.counter(group).add(number, 1);
    if (thread != 0) return;
    int complete = 0;
    while (complete < groups.count - 1 && r.counter(complete).get(number) == items) complete++;
    r.begin_sum(index, step.products[0].out, groups.first_chunk(complete));
  }

  // Writes zeros as this rank's part of a sum, if it has no columns of the matrices.
  void clear(int64_t n) {
    for (int m = 0; m < step.count; m++) {
      const ckdist_value& v = r.value(step.products[m].out);
      if (v.place == ckdist_place_logits || (v.place == ckdist_place_slot && r.plan->tokens_sharded)) continue;
      const FloatRows y = r.floats(step.products[m].out);
      for (int64_t t = thread; t < n; t += r.active()) std::fill_n(y.row(t), y.stride, 0.f);
    }
  }

  static int64_t weight_bytes(const Inference& r, const Fields& step) {
    int64_t bytes = 0;
    for (int m = 0; m < step.count; m++) {
      const ckdist_span& w = step.products[m].weight;
      for (int s = w.first; s < w.first + w.count; s++) bytes += r.matrix(s).tile_count() * r.matrix(s).tile_bytes;
    }
    return bytes;
  }

  // Bytes of the longest tile of the products.
  int64_t longest_tile() const {
    int64_t bytes = 0;
    for (int m = 0; m < step.count; m++) bytes = std::max(bytes, r.matrix(step.products[m].weight.first).tile_bytes);
    return bytes;
  }

  // True if threads divide single tiles by columns, into cells: each is one part of a tile's columns. There are few
  // rows on many threads, and all matrices are packed.
  static bool divides_columns(const Inference& r, const Fields& step, int64_t n) {
    if (n > Inference::kFewRows || r.most_threads() <= kSixteen || r.packing || r.plan->prompts || step.summed)
      return false;
    bool divided = false;
    for (int m = 0; m < step.count; m++) {
      if (step.products[m].weight.count != 1) return false;
      divided |= r.parts_of(step.products[m].weight.first) > 1;
    }
    return divided;
  }

  // Bytes of the longest unit that `each_range` divides: a tile or a cell, or those that lie side by side.
  static int64_t piece_bytes(const Inference& r, const Fields& step, bool cells) {
    int64_t longest = 0, together = 0;
    for (int m = 0; m < step.count; m++) {
      const ckdist_span& w = step.products[m].weight;
      for (int s = 0; s < (step.summed ? w.count : 1); s++) {
        const int64_t bytes = r.matrix(w.first + s).tile_bytes / (cells ? r.parts_of(w.first + s) : 1);
        longest = std::max(longest, bytes), together += bytes;
      }
    }
    return step.gate != ckdist_gate_none || step.summed ? together : longest;
  }

  // Calls visit(m, s, column, first tile, end) for the tiles in bytes [from, to) of a step's matrices; `cells`: for the
  // cells. The matrices are laid end to end and divided into pieces of about `piece` bytes. Tiles of gate and up lie
  // side by side, and so do tiles of shards that are summed. `column`: number of rows of the shards before.
  template <class Visit>
  static void each_range(const Inference& r, const Fields& step, int64_t from, int64_t to, int64_t piece, bool cells,
                         Visit&& visit) {
    const bool gated = step.gate != ckdist_gate_none;
    int64_t offset = 0;
    for (int m = 0; m < (gated ? 1 : step.count); m++) {
      const ckdist_span& shards = step.products[m].weight;
      int64_t column = 0;
      for (int s = 0; s < (step.summed ? 1 : shards.count); s++) {
        const Matrix& w = r.matrix(shards.first + s);
        int64_t tile_bytes = w.tile_bytes;
        if (gated) tile_bytes += r.matrix(step.products[1].weight.first + s).tile_bytes;
        for (int more = 1; step.summed && more < shards.count; more++)
          tile_bytes += r.matrix(shards.first + more).tile_bytes;
        const int64_t parts = cells ? r.parts_of(shards.first + s) : 1, units = w.tile_count() * parts;
        const int64_t begin = boundary(from - offset, tile_bytes / parts, units, piece, r.active()),
                      end = boundary(to - offset, tile_bytes / parts, units, piece, r.active());
        if (begin < end) visit(m, s, column, begin, end);
        offset += tile_bytes * w.tile_count();
        column += w.rows;
      }
    }
  }

  // Where the weights of a cell begin.
  static const uint8_t* cell_bytes(const Inference& r, const Matrix& w, int64_t cell, int parts) {
    return r.columns(w, int(cell % parts), parts).tiles + cell / parts * w.tile_bytes;
  }

  // Prefetch for waiting threads in a step of few tokens, when memory would be idle: the start of the thread's first
  // piece of the next product, to the L2 cache.
  static void ahead(Inference& r, int thread, const Fields& step, Ahead& ahead) {
    if (r.rows(step.step) > Inference::kFewRows) return;
    const int64_t bytes = weight_bytes(r, step);
    if (bytes == 0) return;  // this rank has no part of the matrices
    const bool cells = divides_columns(r, step, r.rows(step.step));
    const Shares shares(bytes, piece_bytes(r, step, cells), r.active(), true);
    each_range(r, step, shares.begin(thread), shares.begin(thread + 1), shares.first(), cells,
               [&](int m, int s, int64_t, int64_t begin, int64_t end) {
                 if (ahead.at != nullptr) return;
                 const int number = step.products[m].weight.first + s, parts = cells ? r.parts_of(number) : 1;
                 const Weight& weight = r.weight(number);
                 if (parts == 1) return read_ahead(weight, begin, end, kAheadBytes, ahead);
                 ahead.at = cell_bytes(r, weight.matrix, begin, parts);
                 ahead.end = std::min(cell_bytes(r, weight.matrix, end, parts), ahead.at + kAheadBytes);
               });
  }

  void multiply_bytes(int64_t from, int64_t to, int64_t piece, Range rows) {
    each_range(r, step, from, to, piece, false, [&](int m, int s, int64_t column, int64_t begin, int64_t end) {
      multiply_tiles(m, s, column, {begin, end}, rows);
    });
  }

  void multiply_tiles(int m, int s, int64_t column, Range tiles, Range rows) {
    if (step.summed) multiply_summed(step.products[m], tiles, rows);
    else if (step.gate != ckdist_gate_none) multiply_gated(s, column, tiles, rows);
    else multiply(step.products[m], s, column, tiles, rows);
  }

  // All threads compute n rows of `bytes` bytes of weights, divided into cells.
  void multiply_cells(int64_t bytes, int64_t n) {
    const Shares shares(bytes, piece_bytes(r, step, true), r.active(), true);
    const auto take = [&](int64_t piece) {
      each_range(r, step, shares.begin(piece), shares.begin(piece + 1), shares.first(), true,
                 [&](int m, int, int64_t, int64_t begin, int64_t end) { multiply_cells(m, {begin, end}, n); });
    };
    take(thread);
    r.take_items(thread, index, shares.pieces() - r.active(), [&](int64_t i) { take(r.active() + i); });
  }

  // Multiplies by some cells of a matrix, or of gate and up. If others have the rest of a tile, the thread that ends
  // the tile's last cell adds them all.
  void multiply_cells(int m, Range cells, int64_t n) {
    const int parts = r.parts_of(step.products[m].weight.first);
    const uint32_t number = r.step_number(index);
    for (int64_t cell = cells.begin, next; cell < cells.end; cell = next) {
      const int64_t tile = cell / parts;
      next = std::min(cells.end, (tile + 1) * parts);
      if (next - cell == parts) {
        next = cells.end / parts * parts;
        multiply_tiles(m, 0, 0, {tile, next / parts}, {0, n});
        continue;
      }
      const int last = step.gate != ckdist_gate_none ? 2 : m + 1;
      for (int64_t i = cell; i < next; i++)
        for (int own = m; own < last; own++) multiply_cell(own, i, n);
      const auto count = uint32_t(next - cell);
      if (r.counter(StepCommunicator::kMaxChunks + int(place(m).tiles + tile)).add(number, count) + count !=
          uint32_t(parts))
        continue;
      for (int own = m; own < last; own++) add_cells(own, tile, n);
      if (step.gate != ckdist_gate_none)
        join(0, {tile, tile + 1}, {0, n}, r.matrix(step.products[m].weight.first).rows);
    }
  }

  // Tiles and cells of the matrices before number m.
  struct Place {
    int64_t tiles = 0, cells = 0;
  };
  static Place place(const Inference& r, const Fields& step, int m) {
    Place before;
    for (int i = 0; i < m; i++) {
      const int number = step.products[i].weight.first;
      const int64_t tiles = r.matrix(number).tile_count();
      before.tiles += tiles, before.cells += tiles * r.parts_of(number);
    }
    return before;
  }
  Place place(int m) const { return place(r, step, m); }
  // The product of a cell, (rows, kTileRows).
  float* sums(int m, int64_t cell) const {
    return reinterpret_cast<float*>(r.workspace()) + (place(m).cells + cell) * kCellFloats;
  }

  void multiply_cell(int m, int64_t cell, int64_t n) {
    const Product& p = step.products[m];
    const Matrix& w = r.matrix(p.weight.first);
    const int parts = r.parts_of(p.weight.first);
    const int64_t tile = cell / parts;
    Matrix own = r.columns(w, int(cell % parts), parts);
    own.tiles += tile * w.tile_bytes, own.rows = std::min<int64_t>(w.rows - tile * kTileRows, kTileRows);
    r.multiply(thread, own, r.activations(thread, step.step, p.x.first), r.value(p.x.first).stride, n, sums(m, cell),
               kTileRows);
  }

  // Adds a tile's cells in their order, and ends the tile.
  void add_cells(int m, int64_t tile, int64_t n) {
    const Product& p = step.products[m];
    const Matrix& w = r.matrix(p.weight.first);
    const int parts = r.parts_of(p.weight.first);
    const int64_t columns = std::min<int64_t>(w.rows - tile * kTileRows, kTileRows);
    const auto [y, stride] = tile_rows(p, 0, tile * kTileRows, 0);
    for (int64_t t = 0; t < n; t++) {
      std::copy_n(sums(m, tile * parts) + t * kTileRows, columns, y + t * stride);
      for (int part = 1; part < parts; part++)
        r.kernels.elementwise.add(sums(m, tile * parts + part) + t * kTileRows, columns, y + t * stride);
    }
    complete(p, 0, {tile, tile + 1}, {0, n}, y, stride);
  }

  // The first of some rows of the activations `x`.
  const uint8_t* first_of(int x, Range rows) const {
    return r.activations(thread, step.step, x) + rows.begin * r.value(x).stride;
  }

  // Multiplies rows of the activations `x` by tiles of one shard. The first row begins a strip. y[row][0] belongs
  // to the first row of the first tile.
  void product(int matrix, int x, Range tiles, Range rows, float* y, int64_t stride) {
    const int64_t x_stride = r.value(x).stride;
    const uint8_t* const at = first_of(x, rows);
    const int parts = r.parts_of(matrix);
    const bool strips = r.in_strips(step.step, x);
    each_packed(r, thread, r.weight(matrix), tiles.begin, tiles.end, [&](const Matrix& w, int64_t first) {
      float* const own = y + (first - tiles.begin) * kTileRows;
      if (parts == 1) r.multiply(thread, w, at, x_stride, rows.end - rows.begin, own, stride, strips);
      else multiply_parts(w, parts, at, x_stride, strips, rows.end - rows.begin, own, stride);
    });
  }

  // Adds the products of parts of the columns in their order.
  void multiply_parts(const Matrix& w, int parts, const uint8_t* x, int64_t x_stride, bool strips, int64_t rows,
                      float* y, int64_t stride) {
    float* const sum = buffers().part;
    const int64_t tiles_each = rows <= Inference::kFewRows ? kStreamedTiles : kSummedTiles;
    for (int64_t tile = 0; tile < w.tile_count(); tile += tiles_each) {
      const int64_t width = std::min(w.rows - tile * kTileRows, tiles_each * kTileRows);
      for (int64_t row = 0; row < rows; row += kSummedTokens) {
        const int64_t some = std::min(rows - row, kSummedTokens);
        float* const to = y + row * stride + tile * kTileRows;
        for (int part = 0; part < parts; part++) {
          Matrix own = r.columns(w, part, parts);
          own.tiles += tile * w.tile_bytes, own.rows = width;
          r.multiply(thread, own, x + row * x_stride, x_stride, some, part == 0 ? to : sum, part == 0 ? stride : width,
                     strips);
          for (int64_t t = 0; part > 0 && t < some; t++)
            r.kernels.elementwise.add(sum + t * width, width, to + t * stride);
        }
      }
    }
  }

  // The result's rows, from `row` on, at column `column` + `from`.
  FloatRows tile_rows(const Product& p, int64_t column, int64_t from, int64_t row) const {
    const auto [out, stride] = r.floats(p.out);
    return {out + (r.first_row(step.step) + row) * stride + column + from, stride};
  }

  // Multiplies by tiles of shard s. The shard's first row is column `column` of the result.
  void multiply(const Product& p, int s, int64_t column, Range tiles, Range rows) {
    const auto [y, stride] = tile_rows(p, column, tiles.begin * kTileRows, rows.begin);
    product(p.weight.first + s, p.x.first, tiles, rows, y, stride);
    complete(p, s, tiles, rows, y, stride);
  }

  // Ends products of tiles: bias, low-rank addition, soft cap and activation. y: (rows, rows of the tiles).
  void complete(const Product& p, int s, Range tiles, Range rows, float* y, int64_t stride) {
    const int64_t from = tiles.begin * kTileRows,
                  to = std::min(tiles.end * kTileRows, r.matrix(p.weight.first + s).rows);
    if (p.bias >= 0) add_bias(r.vector(p.bias + s) + from, to - from, rows, y, stride);
    if (p.low.count > 0) add_low(p, s, p.low.first, tiles, rows, y, stride);
    if (step.soft_cap != 0.f)
      for (int64_t t = 0; t < rows.end - rows.begin; t++)
        r.kernels.elementwise.soft_cap(y + t * stride, step.soft_cap, to - from);
    if (step.activation != ckdist_gate_none)
      for (int64_t t = 0; t < rows.end - rows.begin; t++)
        r.kernels.elementwise.activate(GateFunction(step.activation), y + t * stride, to - from);
  }

  void add_bias(const float* bias, int64_t n, Range rows, float* y, int64_t stride) const {
    for (int64_t t = 0; t < rows.end - rows.begin; t++) r.kernels.elementwise.add(bias, n, y + t * stride);
  }

  // y += low * B^T for tiles of the matrices B in shard s, which belong to all rows or to each row's adapter.
  void add_low(const Product& p, int s, int low, Range tiles, Range rows, float* y, int64_t stride) {
    const LowRankSum sum = buffers().low;
    const auto add = [&](const Matrix& w, Range some, const FloatRows& x) {
      const int64_t columns = std::min(tiles.end * kTileRows, w.rows) - tiles.begin * kTileRows;
      sum.add(r.kernels, w, tiles, columns, x.row(some.begin), x.stride, some.end - some.begin,
              y + (some.begin - rows.begin) * stride, stride);
    };
    if (step.adapters == 0) return add(r.matrix(p.low_weight.first + s), rows, r.floats(low));
    const int shards = p.low_weight.count / step.adapters;
    r.each_adapter(step.step, rows, [&](int adapter, int64_t list, Range some) {
      const Matrix& w = r.matrix(p.low_weight.first + adapter * shards + s);
      if (w.cols > 0) add(w, some, r.low_rank(low, list));
    });
  }

  // Multiplies by tiles of gate and up and joins the results. Many rows are divided into blocks of rows and tiles. Few
  // rows read long runs of weights. If weights are not packed, or expanded for prompts, that happens once for all rows.
  void multiply_gated(int s, int64_t column, Range tiles, Range rows) {
    const Product &gate = step.products[0], &up = step.products[1];
    const Matrix &w = r.matrix(gate.weight.first + s), &u = r.matrix(up.weight.first + s);
    if (joins_sums(s)) {
      const auto [y, stride] = tile_rows(gate, column, 0, rows.begin);
      return r.multiply_gated(thread, w, u, tiles, GateFunction(step.gate), first_of(gate.x.first, rows),
                              r.value(gate.x.first).stride, rows.end - rows.begin, y, stride);
    }
    const bool divided = rows.end - rows.begin > Inference::kFewRows && !r.packing;
    const int64_t pair_bytes = w.tile_bytes + u.tile_bytes;
    const bool prompts = r.plan->prompts || r.in_strips(step.step, gate.x.first);
    const int64_t tiles_each = prompts || (divided && w.type == Type::bf16) ? kPromptTiles
                               : divided ? tiles_at_once(kGatedBytes, pair_bytes, kLeastTiles)
                                         : tiles.end - tiles.begin;
    const int64_t rows_each = divided && !prompts ? kGatedRows : rows.end - rows.begin;
    for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_each) {
      const Range some_tiles = {tile, std::min(tile + tiles_each, tiles.end)};
      for (int64_t row = rows.begin; row < rows.end; row += rows_each) {
        const Range some_rows = {row, std::min(row + rows_each, rows.end)};
        for (int m = 0; m < 2; m++) multiply(step.products[m], s, column, some_tiles, some_rows);
        join(column, some_tiles, some_rows, w.rows);
      }
    }
  }

  // True if the sums of gate and up can be joined before they are written.
  bool joins_sums(int s) const {
    const Product &gate = step.products[0], &up = step.products[1];
    const int a = gate.weight.first + s, b = up.weight.first + s;
    const auto plain = [&](const Product& p, int w) { return p.bias < 0 && p.low.count == 0 && r.parts_of(w) == 1; };
    return r.in_strips(step.step, gate.x.first) && gate.x.first == up.x.first && !r.packing && plain(gate, a) &&
           plain(up, b) && r.matrix(a).type == r.matrix(b).type && step.gate_factor == 1.f;
  }

  // gate = f(gate_factor * gate) * up, for tiles of a shard of `most` rows.
  void join(int64_t column, Range tiles, Range rows, int64_t most) {
    const int64_t from = tiles.begin * kTileRows, columns = std::min(tiles.end * kTileRows, most) - from;
    const FloatRows gate = tile_rows(step.products[0], column, from, rows.begin),
                    up = tile_rows(step.products[1], column, from, rows.begin);
    for (int64_t t = 0; t < rows.end - rows.begin; t++) {
      float* const own = gate.row(t);
      for (int64_t i = 0; step.gate_factor != 1.f && i < columns; i++) own[i] *= step.gate_factor;
      r.kernels.elementwise.gated(GateFunction(step.gate), own, up.row(t), columns, own);
    }
  }

  // Multiplies by tiles of a matrix that is sharded by columns. Adds the shards' products in the order of a sum over
  // ranks.
  void multiply_summed(const Product& p, Range tiles, Range rows) {
    float* const sum = buffers().product;
    const auto [out, stride] = r.floats(p.out);
    const bool strips = r.in_strips(step.step, p.x.first);
    const int64_t tiles_each = strips ? kPromptItemTiles : kSummedTiles,
                  rows_each = strips || r.plan->prompts ? kSummedPrompts : kSummedTokens;
    for (int64_t tile = tiles.begin; tile < tiles.end; tile += tiles_each) {
      const Range some_tiles = {tile, std::min(tile + tiles_each, tiles.end)};
      const int64_t from = tile * kTileRows,
                    width = std::min(some_tiles.end * kTileRows, r.matrix(p.weight.first).rows) - from;
      for (int64_t row = rows.begin; row < rows.end; row += rows_each) {
        const Range some_rows = {row, std::min(row + rows_each, rows.end)};
        float* const y = out + row * stride + from;
        bool first = true;
        for (int s = 0; s < p.weight.count; s++) {
          if (r.matrix(p.weight.first + s).cols == 0) continue;
          float* const to = first ? y : sum;
          const int64_t to_stride = first ? stride : width;
          product(p.weight.first + s, p.x.first + s, some_tiles, some_rows, to, to_stride);
          if (first && p.bias >= 0) add_bias(r.vector(p.bias) + from, width, some_rows, y, stride);
          if (p.low.count > 0) add_low(p, 0, p.low.first + s, some_tiles, some_rows, to, to_stride);
          for (int64_t t = 0; !first && t < some_rows.end - some_rows.begin; t++)
            r.kernels.elementwise.add(sum + t * width, width, y + t * stride);
          first = false;
        }
      }
    }
  }

  static int64_t workspace_bytes(const Inference& r, const Fields& step) {
    return divides_columns(r, step, 1) ? place(r, step, step.count).cells * kCellFloats * 4 : 0;
  }

  struct Room {
    float* product;  // of tiles that are summed
    float* part;     // (kSummedTokens, kSummedTiles * kTileRows), if columns may be divided
    LowRankSum low;
  };
  static int64_t summed_floats(const Inference& r, const Fields& step) {
    if (!step.summed) return 0;
    const bool strips = r.kernels.linear[int(r.matrix(step.products[0].weight.first).type)].multiply_prompt;
    if (strips) return kSummedPrompts * kPromptItemTiles * kTileRows;
    return (r.plan->prompts ? kSummedPrompts : kSummedTokens) * kSummedTiles * kTileRows;
  }
  static Room room(Carver& c, const Inference& r, const Fields& step) {
    bool low = false;
    for (int m = 0; m < step.count; m++) low |= step.products[m].low.count > 0;
    return {c.floats(summed_floats(r, step)),
            r.most_threads() > kSixteen ? c.floats(kSummedTokens * kSummedTiles * kTileRows) : nullptr,
            low ? LowRankSum::carve(c) : LowRankSum{}};
  }
};

const RegisteredKind<Linear> kLinear(ckdist_step_linear);

}  // namespace
}  // namespace ckdist
