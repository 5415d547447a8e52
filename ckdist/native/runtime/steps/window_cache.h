// Windows of tokens that are compressed to one entry each: the last rows of a sequence, and the entries in a layer's
// cache.
//
// An entry is computed from float32 rows when its window is complete. So its bits do not depend on a prompt's chunks.
#pragma once
#include <limits>

#include "kernels/half.h"
#include "runtime/steps/recent_rows.h"

namespace ckdist {

struct WindowCache {
  Inference& r;
  const Inference::Layer& layer;
  const ckdist_compression& of;
  RecentRows rows;                           // of a token: keys, then gates, if there are any
  int64_t width, row_width, entries_offset;  // floats of an entry and of a token's row; bytes in a block
  bool narrow;                               // f16, else f32

  WindowCache(Inference& r, int number, const ckdist_compression& of, bool index)
      : r(r), layer(r.layers[number]), of(of), rows(r, number, index ? ckdist_array_index_rows : ckdist_array_rows) {
    const CacheArrays arrays(r.program.layers[number]);
    const auto entries = index ? ckdist_array_index_entries : ckdist_array_entries;
    row_width = rows.width;
    width = entry_width(row_width, of);
    entries_offset = arrays.plain_offset(entries);
    narrow = KvType(arrays.at(entries).type) == KvType::f16;
  }
  static int64_t entry_width(int64_t row_width, const ckdist_compression& of) {
    return row_width / ((of.gates < 0 ? 1 : 2) * (of.overlap ? 2 : 1));
  }
  static int64_t room_floats(int64_t width) { return 5 * width; }

  // Makes the entries of the windows that the batch completes, for a step of the layer, and keeps the last rows of each
  // sequence. Ends with a barrier if there are entries. room: room_floats(width).
  template <class Run>
  void make_entries(const Run& run, float* room) const {
    const int64_t made = each_complete(run.thread, [&](int sequence, int64_t window) {
      compress(sequence, window, run.rotation(r.starts[size_t(sequence)].token, window * of.ratio), run.step.eps, room);
    });
    if (made > 0) r.meet(run.thread, run.index);
    rows.keep(run.thread, [&](int64_t token, float* to) {
      std::copy_n(r.row_of(of.kv, token), of.gates < 0 ? row_width : row_width / 2, to);
      if (of.gates >= 0) std::copy_n(r.row_of(of.gates, token), row_width / 2, to + row_width / 2);
    });
  }

  void read_entry(const int32_t* table, int64_t window, float* out) const { read(entry(table, window), width, out); }

  // Rotates the last elements of a head, or the first.
  static void rotate(const ElementwiseKernel& k, float* head, const Rope& rope, int64_t width, bool front = false) {
    if (rope.dims == 0) return;
    float* const at = front ? head : head + width - rope.dims;
    (rope.interleaved ? k.rope_pairs : k.rope)(at, rope.cos, rope.sin, rope.dims, at);
  }

 private:
  // Calls visit(sequence, window) for this thread's part of the windows that the batch completes. Returns their number.
  template <class Visit>
  int64_t each_complete(int thread, Visit&& visit) const {
    const auto range = [&](int64_t s) {
      const BatchView::Chunk& chunk = r.batch.chunks[s];
      return Range{chunk.first_position / of.ratio, (int64_t{chunk.first_position} + chunk.tokens) / of.ratio};
    };
    int64_t all = 0, before = 0;
    for (int64_t s = 0; s < r.batch.sequences; s++) all += range(s).end - range(s).begin;
    const Range own = r.part_of(thread, all);
    for (int64_t s = 0; s < r.batch.sequences; before += range(s).end - range(s).begin, s++)
      for (int64_t w = range(s).begin; w < range(s).end; w++)
        if (const int64_t i = before + w - range(s).begin; i >= own.begin && i < own.end) visit(int(s), w);
    return all;
  }

  // Computes and stores the entry of a window. `rope`: the rotation of the window's first position.
  void compress(int sequence, int64_t window, const Rope& rope, float eps, float* room) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    float *const most = room, *const sum = most + width, *const total = sum + width, *const gate = total + width,
                 *const normed = gate + width;
    const int64_t first = r.batch.chunks[sequence].first_position, first_token = r.starts[size_t(sequence)].token;
    const auto part_of = [&](int64_t position, int64_t part, bool gates) {
      const float* const row = position >= first ? r.row_of(gates ? of.gates : of.kv, first_token + position - first)
                                                 : rows.before(sequence, position) + (gates ? row_width / 2 : 0);
      return row + part * width;
    };
    const auto read_gate = [&](int64_t position, int64_t part) {
      const float* const bias = r.vector(of.bias) + position % of.ratio * (row_width / 2) + part * width;
      const float* const stored = part_of(position, part, true);
      for (int64_t i = 0; i < width; i++) gate[i] = stored[i] + bias[i];
    };
    if (of.gates < 0) {
      std::fill(total, total + width, 0.f);
      each_slot(window, [&](int64_t position, int64_t part) {
        k.add_scaled(part_of(position, part, false), 1.f, width, total);
      });
      for (int64_t i = 0; i < width; i++) total[i] /= float(of.ratio);
      return finish(total, sequence, window, rope, eps);
    }
    std::fill(most, most + width, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + 2 * width, 0.f);
    each_slot(window, [&](int64_t position, int64_t part) {
      read_gate(position, part);
      for (int64_t i = 0; i < width; i++) most[i] = std::max(most[i], gate[i]);
    });
    each_slot(window, [&](int64_t position, int64_t part) {
      read_gate(position, part);
      const float* key = part_of(position, part, false);
      if (of.key_norm >= 0) {
        k.layer_norm(key, r.vector(of.key_norm), r.vector(of.key_bias), eps, width, normed);
        key = normed;
      }
      for (int64_t i = 0; i < width; i++) gate[i] -= most[i];
      k.sum_exp(gate, width, 0.f, 1.f, gate);
      for (int64_t i = 0; i < width; i++) sum[i] += gate[i], total[i] += gate[i] * key[i];
    });
    for (int64_t i = 0; i < width; i++) total[i] /= sum[i];
    finish(total, sequence, window, rope, eps);
  }

  // Norms, rotates and stores an entry.
  void finish(float* total, int sequence, int64_t window, const Rope& rope, float eps) const {
    const ElementwiseKernel& k = r.kernels.elementwise;
    if (of.norm >= 0) k.rms_norm(total, r.vector(of.norm), eps, width, total);
    rotate(k, total, rope, width, of.front != 0);
    write(total, width, entry(r.table_of(sequence), window));
  }

  int64_t bytes() const { return narrow ? 2 : 4; }
  uint8_t* entry(const int32_t* table, int64_t window) const {
    const int64_t slot = of.ratio < kBlockTokens ? window % (kBlockTokens / of.ratio) : 0;
    const int64_t block = table[((window + 1) * of.ratio - 1) / kBlockTokens];
    return layer.blocks + block * layer.block_stride + entries_offset + slot * width * bytes();
  }
  // visit(position, part of the row) for the rows that a window's entry is made of.
  template <class Visit>
  void each_slot(int64_t window, Visit&& visit) const {
    const int64_t first = window * of.ratio;
    for (int64_t j = 0; of.overlap && window > 0 && j < of.ratio; j++) visit(first - of.ratio + j, 0);
    for (int64_t j = 0; j < of.ratio; j++) visit(first + j, of.overlap ? 1 : 0);
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
