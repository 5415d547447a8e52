// Replays a lowered training program: every thread of the rank walks the same list of steps and meets the others at
// barriers.
//
// Work is shared out in items to whoever is free; an item's numbers depend on the batch alone, and sums over tokens are
// made in chunks of fixed size that are added in order. So the same bits come out run after run and for any number of
// threads.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/export.h"

#include "api/training.h"
#include "comm/communicator.h"
#include "core/arena.h"
#include "kernels/kernels.h"
#include "runtime/pool.h"

namespace ckdist {

class Training {
 public:
  Training(const ckdist_training_program& program, Communicator* communicator, int threads, std::vector<int> cpus,
           int spins);

  double run(const ckdist_training_batch& batch, bool backward, bool clear, bool reduce);
  std::array<double, 19> times() const { return times_; }
  std::array<int64_t, 3> bytes() const { return {program_.arena_bytes, workspace_bytes_, frozen_bytes_}; }

 private:
  using Step = ckdist_training_step;
  static constexpr int kRows = 16;     // tokens of one item of row-wise work
  static constexpr int kSumRows = 64;  // tokens whose contributions to a vector are added up before they meet others
  static constexpr int kColumns = 64;  // of one item that turns or adds columns
  static constexpr int kTurned = 64;   // tokens that are turned at a time
  static constexpr int kQueries = 16;  // of a block of attention
  static constexpr int kGradQueries = 128;          // of a block of its gradient
  static constexpr int64_t kTileBytes = 384 << 10;  // of the tiles of one item of a product: they stay in the L2 cache
  static constexpr int64_t kMaxTiles = 32, kTokens = 64;  // of such an item at most
  static constexpr int64_t kPackTiles = 8,
                           kPackRows = 32;  // of an item of packing; rows that are packed turned at a time
  static constexpr int64_t kOuterRows = 64,
                           kSumTiles = 24;  // of a gradient's part: so much of both factors stays in the L2 cache
  static constexpr int kLeastSaved =
      8;  // tokens without a target are left out of logits where there are more than one in so many
  static constexpr int64_t kLogitBytes = 32 << 20;  // of gradients by logits
  static constexpr int kRowBuffers = 4;             // floats of a row that steps read or write

  // Rows of elements that products read.
  struct Operand {
    uint8_t* at;
    int64_t stride;
    uint8_t* row(int64_t token) const { return at + token * stride; }
  };
  // out[t][column] = dot(matrix row, x[t]) + bias (+ residual), tokens counted from `first` in `out` and `residual`.
  struct Product {
    Matrix matrix;
    Operand x;
    int64_t tokens;
    int out;  // a value
    const float* bias = nullptr;
    int residual = -1;
    int64_t first = 0;
    Operand to{nullptr, 0};  // rows in place of the value's
  };
  // gradient[column of dy][column of x] (+)= sum over the tokens of dy x.
  struct Outer {
    Operand dy;
    int64_t width;
    float* gradient;
    bool add;  // else overwrite
  };
  struct Batch {
    std::vector<int32_t> token_ids, targets, starts, positions;
    std::vector<int32_t> learned;  // tokens whose logits are computed, in order
    int64_t tokens = 0;
  };
  // Gives out memory from `at` on; from null it only counts.
  struct Carver {
    uint8_t* base;
    int64_t used = 0;
    uint8_t* bytes(int64_t n) {
      uint8_t* const at = base ? base + used : nullptr;
      used += (n + 63) / 64 * 64;
      return at;
    }
    float* floats(int64_t n) { return reinterpret_cast<float*>(bytes(4 * n)); }
  };

  void check(const ckdist_training_batch& batch) const;
  void take(const ckdist_training_batch& batch);
  void replay(int thread);
  void execute(int thread, const Step& step);
  struct Packs {
    Matrix matrix[4];
  };
  Packs packs_of(const Step& step, Carver& c) const;
  void pack(int thread, const int32_t* packs, const Matrix* matrices, int n);
  Packs pack(int thread, const Step& step, Carver& c);
  void pack_frozen(int thread);
  void clear();
  bool adds(const Step& step, int gradient) const { return !(clear_ && (step.i[0] >> gradient & 1)); }
  void rows_of(int thread, const Step& step, int64_t row);
  void rms_norm_grad(int thread, const Step& step);
  void column_sums(int64_t n, float* partial, float* gradient);
  void linear(int thread, const Step& step);
  void linear_grad(int thread, const Step& step);
  void linear_weight_grad(int thread, const Step& step);
  void bias_grad(int thread, const Step& step);
  void embed_grad(const Step& step);
  void attend(int thread, const Step& step, bool gradient);
  void fetch(const Operand& x, int64_t rows) const;
  void fetch_to_write(const Operand& x, int64_t rows) const;
  void fetch_next(const Step& step, int64_t item, int64_t at) const;
  void pack_rows(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const;
  void pack_columns(const Operand& x, int64_t rows, int64_t cols, uint8_t* to) const;
  void attend_item(int thread, const Step& step, int64_t item);
  void attend_grad_item(int thread, const Step& step, int64_t item);
  void cross_entropy(int thread, const Step& step);
  void begin_reduce(const Step& step);
  static int64_t column_items(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
  void turn(const Operand& x, int64_t width, int64_t tokens, uint8_t* tiles, int64_t tile_bytes) const;
  void turn_matrix(const Operand& x, int64_t width, int64_t tokens, int64_t item, uint8_t* tiles) const;
  void add_outer(int thread, const Matrix& x, int64_t tokens, const Outer* outers, int n);
  int64_t item_tiles(const Matrix& matrix) const;
  void multiply(int thread, const Product* products, int count);

  // What steps carve from the workspace and from a thread's own; the same calls size it and use it.
  struct AttendSpace {
    uint8_t *k, *v, *p;
    float *scores, *sums;
  };
  struct AttendGradSpace {
    uint8_t *k, *v, *k_turned, *q_turned, *do_turned, *p_turned, *ds_turned, *ds;
    float *scores, *dp, *dq, *dk, *dv;
  };
  struct LossSpace {
    uint8_t *d, *x_turned, *x, *dx;
    float *largest, *sums, *logits;
  };
  int64_t learned(int64_t index) const { return all_learned() ? index : batch_.learned[index]; }
  bool all_learned() const { return int64_t(batch_.learned.size()) == batch_.tokens; }
  void logits(int thread, const Step& step, const Matrix& head, const LossSpace& s, const Operand& x, int64_t first,
              int64_t n);
  void loss_of(const Step& step, int64_t parts, int64_t columns, const LossSpace& s, int64_t first, int64_t token);
  AttendSpace attend_space(Carver& c, int64_t tokens) const;
  AttendGradSpace attend_grad_space(Carver& c, int64_t tokens) const;
  LossSpace loss_space(Carver& c, const Step& step) const;
  int64_t workspace(const Step& step) const;
  int64_t loss_chunk() const;

  Operand operand(int index, int64_t token = 0) const {
    const ckdist_training_value& v = values_[index];
    return {arena_->data() + v.offset + token * v.stride, v.stride};
  }
  Operand head_of(int index, int64_t token, int64_t head) const {
    const Operand o = operand(index, token);
    return {o.at + head * program_.head_dim * element_bytes(), o.stride};
  }
  Row row(int index, int64_t token) const { return {operand(index, token).at, narrow(index)}; }
  void pad(int index, int64_t token) const;
  // Of a value in floats.
  float* floats(int index, int64_t token) const { return reinterpret_cast<float*>(operand(index, token).at); }
  bool narrow(int index) const { return narrow_ && values_[index].operand; }
  // A row in floats: where it lies, or widened into `buffer`.
  const float* read(int index, int64_t token, float* buffer) const {
    if (!narrow(index)) return floats(index, token);
    packing_.widen(operand(index, token).at, width(index), buffer);
    return buffer;
  }
  // Where to write a row in floats; `written` says that it is there.
  float* write(int index, int64_t token, float* buffer) const { return narrow(index) ? buffer : floats(index, token); }
  void written(int index, int64_t token, const float* row) const { store(index, token, 0, row, width(index)); }
  // Columns [column, column + n) of a row, zeros behind its last; a no-op but for these where they are there already.
  void store(int index, int64_t token, int64_t column, const float* x, int64_t n) const;
  int64_t width(int index) const { return values_[index].width; }
  int64_t bytes_of(int index) const { return narrow(index) ? 2 : 4; }  // of an element
  int64_t row_bytes(int index) const { return values_[index].room * bytes_of(index); }
  int64_t row_stride(int index) const {
    return ((row_bytes(index) + 63) / 64 | 1) * 64;
  }  // where a row lies by itself; odd in cache lines
  const float* parameter(int index) const { return program_.parameter_arena + parameters_[index].offset; }
  float* gradient(int index) const { return program_.gradient_arena + parameters_[index].offset; }
  // Columns of activations that any product reads: whole vectors of two bfloat16 each.
  static int64_t padded(int64_t cols) { return (cols + 31) / 32 * 32; }
  // Of rows of elements, odd in cache lines: rows do not share sets of the caches.
  static int64_t stride(int64_t cols, int64_t bytes) { return ((padded(cols) * bytes + 63) / 64 | 1) * 64; }
  int64_t tile_bytes(int64_t cols) const { return (cols + 15) / 16 * 16 * column_bytes(); }
  int64_t turned_bytes() const {
    return tile_bytes(kGradQueries) + 64;
  }  // no multiple of 4096 bytes: tiles do not share sets of the caches
  int64_t column_bytes() const { return type_ == Type::bf16 ? 32 : 64; }
  int64_t element_bytes() const { return narrow_ ? 2 : 4; }  // of values that products read
  int64_t scratch_bytes() const {
    return type_ == Type::bf16 ? 2 : 4;
  }  // of what a step makes and multiplies with tiles
  Matrix matrix(int64_t rows, int64_t cols, const uint8_t* tiles) const {
    return {type_, rows, cols, tile_bytes(cols), tiles};
  }
  static int64_t bytes_of(const Matrix& m) { return m.tile_count() * m.tile_bytes; }
  uint8_t* own(int thread) const { return own_arena_->data() + thread * own_bytes_; }
  float* row_buffer(int thread, int n) const { return reinterpret_cast<float*>(own(thread)) + n * row_floats_; }

  // body(item) for every item, by whoever is free; returns when all are done.
  template <class Body>
  void share(int64_t items, Body&& body) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) body(item);
    pool_.barrier([this] { next_.store(0, std::memory_order_relaxed); });
  }
  template <class Body>
  void share_tokens(Body&& body) {
    share((batch_.tokens + kRows - 1) / kRows, [&](int64_t item) {
      const int64_t end = (item + 1) * kRows < batch_.tokens ? (item + 1) * kRows : batch_.tokens;
      for (int64_t t = item * kRows; t < end; ++t) body(t);
    });
  }

  const ckdist_training_program program_;
  const std::vector<Step> steps_, loss_steps_;
  const std::vector<ckdist_training_value> values_;
  const std::vector<ckdist_training_parameter> parameters_;
  const std::vector<ckdist_training_pack> packs_;
  Communicator* const communicator_;
  const Kernels& kernels_;
  const bool narrow_;  // values that products read are bfloat16
  const PackKernel& packing_;
  const ProductKernel& product_;
  const Type type_;  // of tiles
  const ProductKernel& scratch_product_;
  std::vector<Matrix> packed_;  // without tiles where a parameter is trained: each step packs what it multiplies with
  std::vector<int32_t>
      frozen_;  // the packs of the others, forms of one parameter one after the other: it is read from memory once
  int64_t frozen_bytes_ = 0, workspace_bytes_ = 0, own_bytes_ = 0, row_floats_ = 0;
  std::optional<Arena> arena_, frozen_arena_, workspace_, own_arena_;
  Batch batch_;
  std::vector<int> cleared_;  // parameters whose gradients no product overwrites
  bool backward_ = false, clear_ = false, reduce_ = false, frozen_packed_ = false;
  std::vector<double> losses_;  // of the tokens
  std::vector<std::shared_ptr<Communicator::Operation>> operations_;
  std::array<double, 19> times_{};
  alignas(64) std::atomic<int64_t> next_{0};
  Pool pool_;  // last: its threads use all of the above
};

}  // namespace ckdist
