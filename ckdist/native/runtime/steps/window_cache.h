// Windows of tokens that are compressed to one entry each: the rows of tokens and the entries in a layer's cache.
//
// An entry is computed from stored rows when its window is complete. So its bits do not depend on a prompt's chunks.
#pragma once
#include <limits>

#include "kernels/half.h"
#include "runtime/inference.h"

namespace ckdist {

struct WindowCache {
  Inference& r;
  const Inference::Layer& layer;
  const ckdist_compression& of;
  int64_t width, row_width, rows_offset, entries_offset;  // floats of an entry and of a token's row; bytes in a block
  bool narrow;                                            // f16, else f32

  WindowCache(Inference& r, int number, const ckdist_compression& of, bool index)
      : r(r), layer(r.layers[number]), of(of) {
    const CacheArrays arrays{r.program.layers[number].arrays, r.program.layers[number].array_count};
    const auto rows = index ? ckdist_array_index_rows : ckdist_array_rows;
    const auto entries = index ? ckdist_array_index_entries : ckdist_array_entries;
    row_width = arrays.at(rows).width;
    width = row_width / (of.overlap ? 4 : 2);
    rows_offset = arrays.plain_offset(rows), entries_offset = arrays.plain_offset(entries);
    narrow = KvType(arrays.at(rows).type) == KvType::f16;
  }
  static int64_t room_floats(int64_t width) { return 5 * width; }

  // `table`: the blocks of a sequence.
  void store_row(const int32_t* table, int64_t position, const float* kv, const float* gates) const {
    uint8_t* const at = row(table, position);
    write(kv, row_width / 2, at);
    write(gates, row_width / 2, at + row_width / 2 * bytes());
  }

  // Calls visit(sequence, window) for this thread's part of the windows that the batch completes. Returns their number.
  template <class Visit>
  int64_t each_complete(int thread, Visit&& visit) const {
    const auto range = [&](int64_t s) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      return Range{chunk.first_position / of.ratio, (int64_t{chunk.first_position} + chunk.tokens) / of.ratio};
    };
    int64_t all = 0, before = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) all += range(s).end - range(s).begin;
    const Range own = {all * thread / r.active(), all * (thread + 1) / r.active()};
    for (int64_t s = 0; s < r.batch.sequences; before += range(s).end - range(s).begin, s++)
      for (int64_t w = range(s).begin; w < range(s).end; w++)
        if (const int64_t i = before + w - range(s).begin; i >= own.begin && i < own.end) visit(int(s), w);
    return all;
  }

  // Computes and stores the entry of a window. `rope`: the rotation of its first position. room: room_floats(width).
  void compress(const int32_t* table, int64_t window, const Rope& rope, float eps, float* room) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    float *const most = room, *const sum = most + width, *const total = sum + width, *const gate = total + width,
                 *const key = gate + width;
    std::fill(most, most + width, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + 2 * width, 0.f);
    each_slot(window, [&](int64_t position, int64_t part) {
      read_gate(table, position, part, gate);
      for (int64_t i = 0; i < width; i++) most[i] = std::max(most[i], gate[i]);
    });
    each_slot(window, [&](int64_t position, int64_t part) {
      read_gate(table, position, part, gate);
      for (int64_t i = 0; i < width; i++) gate[i] -= most[i];
      k.sum_exp(gate, width, 0.f, 1.f, gate);
      read(row(table, position) + part * width * bytes(), width, key);
      for (int64_t i = 0; i < width; i++) sum[i] += gate[i], total[i] += gate[i] * key[i];
    });
    for (int64_t i = 0; i < width; i++) total[i] /= sum[i];
    k.rms_norm(total, r.vector(of.norm), eps, width, total);
    rotate_end(k, total, rope, width);
    write(total, width, entry(table, window));
  }

  void read_entry(const int32_t* table, int64_t window, float* out) const { read(entry(table, window), width, out); }

  // Rotates the last elements of a head.
  static void rotate_end(const ElementwiseKernel& k, float* head, const Rope& rope, int64_t width) {
    if (rope.dims == 0) return;
    float* const at = head + width - rope.dims;
    (rope.interleaved ? k.rope_pairs : k.rope)(at, rope.cos, rope.sin, rope.dims, at);
  }

 private:
  int64_t bytes() const { return narrow ? 2 : 4; }
  uint8_t* block(const int32_t* table, int64_t position) const {
    return layer.blocks + table[position / kBlockTokens] * layer.block_stride;
  }
  uint8_t* row(const int32_t* table, int64_t position) const {
    return block(table, position) + rows_offset + position % kBlockTokens * row_width * bytes();
  }
  uint8_t* entry(const int32_t* table, int64_t window) const {
    const int64_t slot = of.ratio < kBlockTokens ? window % (kBlockTokens / of.ratio) : 0;
    return block(table, (window + 1) * of.ratio - 1) + entries_offset + slot * width * bytes();
  }
  // visit(position, part of the row) for the rows that a window's entry is made of.
  template <class Visit>
  void each_slot(int64_t window, Visit&& visit) const {
    const int64_t first = window * of.ratio;
    for (int64_t j = 0; of.overlap && window > 0 && j < of.ratio; j++) visit(first - of.ratio + j, 0);
    for (int64_t j = 0; j < of.ratio; j++) visit(first + j, of.overlap ? 1 : 0);
  }
  void read_gate(const int32_t* table, int64_t position, int64_t part, float* gate) const {
    read(row(table, position) + (row_width / 2 + part * width) * bytes(), width, gate);
    const float* const bias = r.vector(of.bias) + position % of.ratio * (row_width / 2) + part * width;
    for (int64_t i = 0; i < width; i++) gate[i] += bias[i];
  }
  void read(const uint8_t* from, int64_t n, float* out) const {
    if (!narrow) return void(std::copy_n(reinterpret_cast<const float*>(from), n, out));
    for (int64_t i = 0; i < n; i++) out[i] = float_of_half(reinterpret_cast<const uint16_t*>(from)[i]);
  }
  void write(const float* x, int64_t n, uint8_t* to) const {
    if (!narrow) return void(std::copy_n(x, n, reinterpret_cast<float*>(to)));
    for (int64_t i = 0; i < n; i++) reinterpret_cast<uint16_t*>(to)[i] = half_of_float(x[i]);
  }
};

}  // namespace ckdist
