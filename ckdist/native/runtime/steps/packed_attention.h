// Common parts of attention within packed sequences and its gradient (Dao et al. 2022, arXiv:2205.14135). An item is
// one kv-head of one sequence with all query heads that share it, so no two items write the same memory. All products
// use packed tiles. Blocks of keys that no query of a block sees are skipped.
#pragma once
#include <algorithm>

#include "runtime/training.h"

namespace ckdist {

inline int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }
inline int64_t tiles_of(int64_t n) { return (n + 15) / 16; }

template <class Fields>
struct PackedAttention : TrainingRun<Fields> {
  static constexpr int kQueries = 16;  // queries of a block

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

  // Runs body(item) for every (sequence, kv-head) that has tokens.
  template <class Body>
  void each_head(Body&& body) {
    const int64_t sequences = int64_t(this->r.batch.starts.size()) - 1;
    this->parallel_for(sequences * kv_heads, [&](int64_t item) {
      const int64_t sequence = item / kv_heads;
      if (this->r.batch.starts[sequence + 1] != this->r.batch.starts[sequence]) body(item);
    });
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
      for (int64_t at = 0; at < width * this->r.element_bytes(); at += 64) __builtin_prefetch(x.row(row) + at, 0, 2);
  }
  void fetch_to_write(const Operand& x, int64_t rows, int64_t width) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t at = 0; at < width * this->r.element_bytes(); at += 64) __builtin_prefetch(x.row(row) + at, 1);
  }

  // Prefetches keys and values [at, at + kQueries) of the item that this thread probably takes next.
  void fetch_next(int64_t item, int64_t at) const {
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
    for (int64_t tile = 0; tile < tiles_of(cols); tile += 2)
      this->r.packing.operand_columns(x.at + tile * 16 * this->r.element_bytes(), x.stride,
                                      int(std::min<int64_t>(32, cols - tile * 16)), rows,
                                      to + tile * this->r.tile_bytes(rows), this->r.tile_bytes(rows));
  }
};

}  // namespace ckdist
