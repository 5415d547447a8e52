// Common parts of attention within packed sequences and its gradient (Dao et al. 2022, arXiv:2205.14135). An item is
// one kv-head of one sequence with all query heads that share it, so no two items write the same memory. All products
// use packed tiles. Blocks of keys that no query of a block sees are skipped.
//
// If ranks divide the batch, each computes its own queries. Keys and values of all ranks are gathered to the workspace
// first, in rank order.
#pragma once
#include "kernels/prefetch.h"
#include "runtime/training.h"

namespace ckdist {

// Queries [first, end) of a sequence, in this rank's rows from `token` on.
struct OwnQueries {
  int64_t first, end, token;
};

// One kv-head of one sequence.
struct AttentionItem {
  int64_t number, kv_head, begin, n;  // begin: the sequence's place in the batch; n: keys that any own query sees
  OwnQueries queries[2];              // two ranges if ranks divide the batch, else one
  int64_t part = 0;                   // number of this part, if threads divide the item
};

template <class Fields>
struct PackedAttention : TrainingRun<Fields> {
  static constexpr int kQueries = 32;  // queries of a block

  // Numbers of this rank's heads, and their widths. They follow from the widths of the values.
  const int64_t heads = this->r.width(this->step.log_sum_exp);
  const int64_t key_width = key_width_of(this->r, this->step), value_width = value_width_of(this->r, this->step);
  const int64_t kv_heads = this->r.width(this->step.k) / key_width, group = heads / kv_heads;

  static int64_t key_width_of(const Training& r, const Fields& step) {
    return r.width(step.q) / r.width(step.log_sum_exp);
  }
  static int64_t value_width_of(const Training& r, const Fields& step) {
    return r.width(step.out) / r.width(step.log_sum_exp);
  }
  // A head's columns of the rows from `token` on: key_head for queries and keys, value_head for values and results.
  Operand key_head(int index, int64_t token, int64_t head) const {
    return this->r.head_of(index, token, head, key_width);
  }
  Operand value_head(int index, int64_t token, int64_t head) const {
    return this->r.head_of(index, token, head, value_width);
  }

  static constexpr int64_t kPartQueries = 128;  // parts of an item have whole blocks of queries

  // Runs body(item) for `parts` parts of every (sequence, kv-head) that has queries on this rank.
  template <class Body>
  void each_head(int64_t parts, Body&& body) {
    const int64_t sequences = int64_t(this->r.batch.starts.size()) - 1;
    this->parallel_for(sequences * kv_heads * parts, [&](int64_t number) {
      AttentionItem item = item_of(number / parts);
      item.part = number % parts;
      if (item.n) body(item);
    });
  }
  // The parts of an item: 1 if there are items for all threads, else enough for an even load.
  int64_t parts() const {
    const int64_t sequences = int64_t(this->r.batch.starts.size()) - 1, threads = this->r.threads();
    int64_t items = 0, longest = 0;
    for (int64_t s = 0; s < sequences && items < threads; ++s) {
      const int64_t n = item_of(s * kv_heads).n;
      items += n ? kv_heads : 0, longest = std::max(longest, n);
    }
    if (items >= threads || !items) return 1;
    return std::clamp<int64_t>(4 * threads / items, 1, parts_of(longest, kPartQueries));
  }
  // The item with the queries of its part alone.
  AttentionItem queries_of_part(AttentionItem item, int64_t parts) const {
    item.n = 0;
    for (OwnQueries& own : item.queries) {
      const int64_t blocks = parts_of(own.end - own.first, kPartQueries);
      const int64_t first = own.first + blocks * item.part / parts * kPartQueries;
      own.end = std::min(own.end, own.first + blocks * (item.part + 1) / parts * kPartQueries);
      own.token += first - own.first, own.first = first;
      if (own.first < own.end) item.n = own.end;
    }
    return item;
  }
  AttentionItem item_of(int64_t number) const {
    const int64_t begin = this->r.batch.starts[number / kv_heads], end = this->r.batch.starts[number / kv_heads + 1];
    AttentionItem item{number, number % kv_heads, begin, 0, {}};
    if (!is_divided()) return item.queries[0] = {0, end - begin, begin}, item.n = end - begin, item;
    const int64_t chunk = this->r.chunk_tokens();
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t at = this->r.own_chunk(i) * chunk, first = std::max(begin, at), last = std::min(end, at + chunk);
      if (first >= last) continue;
      item.queries[i] = {first - begin, last - begin, first - at + i * chunk};
      item.n = last - begin;
    }
    return item;
  }

  // Divided batches: a row of the gathered values has a token's keys, then its values.

  bool is_divided() const { return this->r.sequence_ranks() > 1; }
  int64_t row_elements() const { return kv_heads * (key_width + value_width); }
  static int64_t row_elements(const Training& r, const Fields& step) { return r.width(step.k) + r.width(step.v); }
  static int64_t shared_row_bytes(const Training& r, const Fields& step) {
    return (row_elements(r, step) * r.element_bytes() + 63) / 64 * 64;
  }
  // Bytes of the rows of this rank, and after them those of all ranks. Products may read some bytes after the last.
  static int64_t gathered_bytes(const Training& r, const Fields& step) {
    return r.sequence_ranks() == 1 ? 0 : (r.program.max_tokens + r.most_keys()) * shared_row_bytes(r, step) + 256;
  }
  // The gathered row of a token of the batch.
  int64_t row_of(int64_t at) const {
    const int64_t chunk = this->r.chunk_tokens(), ranks = this->r.sequence_ranks(), c = at / chunk;
    const int64_t place = c < ranks ? 2 * c : 2 * (2 * ranks - 1 - c) + 1;
    return place * chunk + at % chunk;
  }
  void gather_keys() {
    Training& r = this->r;
    const int64_t bytes = shared_row_bytes(r, this->step), keys = kv_heads * key_width * r.element_bytes();
    uint8_t* const own = r.workspace();
    this->each_token([&](int64_t t) {
      std::copy_n(r.operand(this->step.k, t).at, keys, own + t * bytes);
      std::copy_n(r.operand(this->step.v, t).at, kv_heads * value_width * r.element_bytes(), own + t * bytes + keys);
    });
    r.meet(this->thread, this->index, true,
           [&](Idle) { r.gather_sequence(own, r.batch.tokens * bytes, own + r.program.max_tokens * bytes); });
  }
  uint8_t* copied = nullptr;  // in this thread's memory: 16 rows of one head, for each_gathered()
  static int64_t copied_bytes(const Training& r, const Fields& step) {
    const int64_t widest = std::max(key_width_of(r, step), value_width_of(r, step));
    return r.sequence_ranks() == 1 ? 0 : 16 * ((widest * r.element_bytes() + 63) / 64 * 64) + 256;
  }
  // Calls body(rows, count, key) for 16 keys of an item at a time, or fewer: their columns from `column` on. Rows of
  // several chunks are copied side by side.
  template <class Body>
  void each_gathered(const AttentionItem& item, int64_t column, int64_t width, Body&& body) const {
    const Training& r = this->r;
    const int64_t bytes = shared_row_bytes(r, this->step), row = (width * r.element_bytes() + 63) / 64 * 64;
    uint8_t* const rows = r.workspace() + r.program.max_tokens * bytes + column * r.element_bytes();
    for (int64_t key = 0; key < item.n; key += 16) {
      const int64_t count = std::min<int64_t>(16, item.n - key), first = row_of(item.begin + key);
      if (row_of(item.begin + key + count - 1) == first + count - 1) {
        body(Operand{rows + first * bytes, bytes}, count, key);
        continue;
      }
      for (int64_t i = 0; i < count; ++i)
        std::copy_n(rows + row_of(item.begin + key + i) * bytes, width * r.element_bytes(), copied + i * row);
      body(Operand{copied, row}, count, key);
    }
  }
  // The first key that a query sees.
  int64_t first_seen(int64_t query) const {
    const int64_t window = this->step.window;
    if (window < 0) return query / -window * -window;
    return window ? std::max<int64_t>(0, query - window + 1) : 0;
  }

  // Prefetches a head's columns of some rows during other products. The rows are a few cache lines each and far apart,
  // so waiting for each of them would be slow. To the L2 cache, or to the L1 cache for writing.
  void fetch(const Operand& x, int64_t rows, int64_t width) const {
    for (int64_t row = 0; row < rows; ++row)
      fetch_lines(x.row(row), int(parts_of(width * this->r.element_bytes(), 64)));
  }
  void fetch_to_write(const Operand& x, int64_t rows, int64_t width) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t at = 0; at < width * this->r.element_bytes(); at += 64) __builtin_prefetch(x.row(row) + at, 1);
  }

  // Prefetches keys and values [at, at + kQueries) of the item that this thread probably takes next.
  void fetch_next(int64_t item, int64_t at) const {
    if (is_divided()) return;
    const int64_t next = item + this->r.threads(), sequence = next / kv_heads;
    if (sequence + 1 >= int64_t(this->r.batch.starts.size())) return;
    const int64_t rows =
        std::clamp<int64_t>(this->r.batch.starts[sequence + 1] - this->r.batch.starts[sequence] - at, 0, kQueries);
    const int64_t token = this->r.batch.starts[sequence] + at, head = next % kv_heads;
    fetch(key_head(this->step.k, token, head), rows, key_width);
    fetch(value_head(this->step.v, token, head), rows, value_width);
  }

  // Packs rows of an operand as a matrix (rows, cols), or transposed (cols, rows).
  void pack_rows(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const {
    for (int64_t tile = 0; tile < tiles_of(rows); ++tile)
      this->r.packing.operand_rows(x.row(tile * 16), x.stride, int(std::min<int64_t>(16, rows - tile * 16)), cols,
                                   to + tile * this->r.tile_bytes(cols));
  }
  void pack_columns(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const {
    this->r.pack_columns(x, rows, cols, to, this->r.tile_bytes(rows));
  }
  // Packs an item's keys or values as a matrix (item.n, width), or transposed.
  void pack_keys(const AttentionItem& item, bool values, uint8_t* to) const {
    const Training& r = this->r;
    const int64_t width = values ? value_width : key_width;
    if (!is_divided()) return pack_rows(own_rows(item, values), item.n, width, to);
    each_gathered(item, column_of(item, values), width, [&](const Operand& x, int64_t count, int64_t key) {
      r.packing.operand_rows(x.at, x.stride, int(count), width, to + key / 16 * r.tile_bytes(width));
    });
  }
  void pack_keys_transposed(const AttentionItem& item, bool values, uint8_t* to) const {
    const Training& r = this->r;
    const int64_t width = values ? value_width : key_width, bytes = r.tile_bytes(item.n);
    if (!is_divided()) return pack_columns(own_rows(item, values), item.n, width, to);
    each_gathered(item, column_of(item, values), width, [&](const Operand& x, int64_t count, int64_t key) {
      r.pack_columns(x, count, width, to + key * r.column_bytes(), bytes);
    });
  }
  // The rows of an item's keys or values on this rank.
  Operand own_rows(const AttentionItem& item, bool values) const {
    return values ? value_head(this->step.v, item.begin, item.kv_head)
                  : key_head(this->step.k, item.begin, item.kv_head);
  }
  // The column of gathered rows at which an item's keys or values begin.
  int64_t column_of(const AttentionItem& item, bool values) const {
    return values ? kv_heads * key_width + item.kv_head * value_width : item.kv_head * key_width;
  }
};

}  // namespace ckdist
