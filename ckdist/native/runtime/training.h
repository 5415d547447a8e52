// What the steps of training work on: a lowered loss with its gradients, parameters, packed matrices and the batch.
//
// Work is given out in items to whichever thread is free; an item's numbers depend on the batch alone, and sums over
// tokens are made in chunks of fixed size that are added in order. So the same bits come out run after run and for any
// number of threads.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "core/export.h"

#include "api/training.h"
#include "comm/communicator.h"
#include "kernels/kernels.h"
#include "runtime/executor.h"
#include "runtime/sliced_matrix.h"

namespace ckdist {

// Rows of elements that products read.
struct Operand {
  uint8_t* at;
  int64_t stride;
  uint8_t* row(int64_t token) const { return at + token * stride; }
};

class Training : public Executor {
 public:
  // `data`: of the replicas; `tensor`: of the ranks that share the tensors; `stages`: one rank of each; or null.
  Training(const ckdist_training_program& program, Communicator* data, Communicator* tensor, Communicator* stages,
           std::shared_ptr<Pool> pool);

  // The sum of the losses.
  double run(const ckdist_training_batch& batch, const ckdist_training_pass& pass);
  void flush();  // returns when other stages have all that was sent
  // By kind, and in the last place of packing.
  std::array<double, ckdist_step_kinds + 1> times() const;
  std::array<int64_t, 3> bytes() const {
    return {program.arena_bytes + program.kept_bytes, workspace_bytes(), frozen_bytes_};
  }

  static constexpr int kRows = 16;       // tokens of one item of row-wise work
  static constexpr int kSumRows = 64;    // tokens whose contributions to a vector are added up before they meet others
  static constexpr int kColumns = 64;    // of one item that transposes or adds columns
  static constexpr int kRowBuffers = 4;  // floats of a row that steps read or write

  struct Batch {
    std::vector<int32_t> token_ids, targets, starts, positions;
    std::vector<int32_t> learned;  // tokens whose logits are computed, in order
    int64_t tokens = 0;
  };

  const ckdist_training_program program;
  const Kernels& kernels;
  const bool narrow_values;  // values that products read are bfloat16
  const PackKernel& packing;
  const ProductKernel& product;
  const Type tile_type;  // of tiles
  const ProductKernel& scratch_product;
  Batch batch;
  std::vector<double> losses;  // of the tokens
  double balance = 0;          // the load-balancing loss times the targets

  // Of tokens whose logits are computed the i-th; whether these are all.
  int64_t learned(int64_t i) const { return all_learned() ? i : batch.learned[i]; }
  bool all_learned() const { return int64_t(batch.learned.size()) == batch.tokens; }

  // Values
  const ckdist_value& value(int index) const { return program.values[index]; }
  Operand operand(int index, int64_t token = 0) const {
    const ckdist_value& v = value(index);
    return {(v.kept ? kept_ : arena_->data()) + v.offset + token * v.stride, v.stride};
  }
  // Of heads of `width` elements.
  Operand head_of(int index, int64_t token, int64_t head, int64_t width) const {
    const Operand o = operand(index, token);
    return {o.at + head * width * element_bytes(), o.stride};
  }
  bool is_operand(int index) const { return value(index).place == ckdist_place_activations; }
  bool narrow(int index) const { return narrow_values && is_operand(index); }
  int64_t width(int index) const { return value(index).width; }
  int64_t bytes_of(int index) const { return narrow(index) ? 2 : 4; }  // of an element
  int64_t row_bytes(int index) const { return value(index).room * bytes_of(index); }
  int64_t row_stride(int index) const {  // where a row lies by itself; odd in cache lines
    return ((row_bytes(index) + 63) / 64 | 1) * 64;
  }
  Row row(int index, int64_t token) const { return {operand(index, token).at, narrow(index)}; }
  // Of a value in floats.
  float* floats(int index, int64_t token) const { return reinterpret_cast<float*>(operand(index, token).at); }
  // A row in floats: where it lies, or widened into `buffer`.
  const float* read(int index, int64_t token, float* buffer) const {
    if (!narrow(index)) return floats(index, token);
    packing.widen(operand(index, token).at, width(index), buffer);
    return buffer;
  }
  // Where to write a row in floats; `written` says that it is there.
  float* write(int index, int64_t token, float* buffer) const { return narrow(index) ? buffer : floats(index, token); }
  void written(int index, int64_t token, const float* row) const { store(index, token, 0, row, width(index)); }
  // Columns [column, column + n) of a row, zeros behind its last; a no-op but for these where they are there already.
  void store(int index, int64_t token, int64_t column, const float* x, int64_t n) const;
  void pad(int index, int64_t token) const;  // zeros behind the width of an operand

  // Parameters
  const ckdist_training_parameter& shape(int index) const { return program.parameters[index]; }
  const Weight* packed_parameter(int index) const { return static_cast<const Weight*>(shape(index).matrix); }
  const float* parameter(int index) const { return program.parameter_arena + shape(index).offset; }
  // Rows [begin, begin + n) of a matrix: where they lie, or unpacked into `buffer`, n times its columns.
  const float* parameter_rows(int index, int64_t begin, int64_t n, float* buffer) const;
  float* gradient(int index) const { return program.gradient_arena + shape(index).offset; }
  const ckdist_training_pack& pack(int index) const { return program.packs[index]; }
  const Matrix& packed(int index) const { return packed_[index]; }  // without tiles where each step packs it
  // Whether what is multiplied is added to what the gradient holds.
  bool adds(bool fresh) const { return !(pass_.clear && fresh); }

  // Sizes of what products read
  // Columns of activations that any product reads: whole vectors of two bfloat16 each.
  static int64_t padded(int64_t cols) { return (cols + 31) / 32 * 32; }
  // Of rows of elements, odd in cache lines: rows do not share sets of the caches.
  static int64_t stride(int64_t cols, int64_t bytes) { return ((padded(cols) * bytes + 63) / 64 | 1) * 64; }
  int64_t column_bytes() const { return tile_type == Type::bf16 ? 32 : 64; }
  int64_t tile_bytes(int64_t cols) const { return (cols + 15) / 16 * 16 * column_bytes(); }
  int64_t element_bytes() const { return narrow_values ? 2 : 4; }  // of values that products read
  int64_t scratch_bytes() const {                                  // of what a step makes and multiplies with tiles
    return tile_type == Type::bf16 ? 2 : 4;
  }
  Matrix matrix(int64_t rows, int64_t cols, const uint8_t* tiles) const {
    return {tile_type, rows, cols, tile_bytes(cols), tiles};
  }
  static int64_t bytes_of(const Matrix& m) { return m.tile_count() * m.tile_bytes; }

  float* row_buffer(int thread, int n) const { return reinterpret_cast<float*>(memory(thread)) + n * row_floats_; }
  int64_t row_buffers_bytes() const { return kRowBuffers * row_floats_ * 4; }
  void count_packing(double seconds) { pack_seconds_ += seconds; }

  // Other ranks
  void begin_reduce(int64_t begin, int64_t end, bool tensor);
  int tensor_ranks() const { return tensor_ ? tensor_->size : 1; }
  void sum_over_tensor(float* x, int64_t n) const;
  // Every rank's n bytes, in the order of ranks.
  void gather_over_tensor(const void* own, int64_t n, void* all) const;
  // Of the batch's rows those that this rank exchanges with other stages.
  std::pair<int64_t, int64_t> own_rows(bool shared) const {
    const auto begin = [&](int64_t rank) { return batch.tokens * rank / tensor_ranks(); };
    if (!shared) return {0, batch.tokens};
    return {begin(tensor_->rank), begin(tensor_->rank + 1)};
  }
  // Where to put the rows of the next message; `make_place` waits until what was there has arrived.
  float* outgoing() const { return program.outgoing[turn_]; }
  void make_place();
  void send(int stage, int tag, int64_t floats);
  void receive(int stage, int tag, float* rows, int64_t floats);
  void push();  // what is on its way needs turns to move on

 private:
  static constexpr int kLeastSaved =
      8;  // tokens without a target are left out of logits where there are more than one in so many

  void make_packs();
  void check(const ckdist_training_batch& batch) const;
  void take(const ckdist_training_batch& batch);
  void replay(int thread);
  void clear(int thread);

  Communicator *const data_, *const tensor_, *const stages_;  // null where this rank is alone
  std::vector<StepList> lists_;
  std::vector<Matrix> packed_;
  std::vector<int32_t> frozen_;  // the packs that are made once, forms of one parameter one after the other: it is read
                                 // from memory once
  int64_t frozen_bytes_ = 0, row_floats_ = 0;
  std::optional<Arena> arena_, kept_arena_, frozen_arena_;
  uint8_t* kept_ = nullptr;  // of the batch
  ckdist_training_pass pass_{};
  bool frozen_packed_ = false;
  std::vector<std::shared_ptr<Communicator::Operation>> operations_;
  std::vector<std::shared_ptr<Communicator::Operation>> sent_;  // of each place of program.outgoing, by turns
  size_t turn_ = 0;
  double pack_seconds_ = 0;
};

// One thread's walk through a step of training.
template <class Fields>
struct TrainingRun : StepRun<Training, Fields> {
  // body(item) for every item, by the threads that are free; returns when all are done.
  template <class Body>
  void parallel_for(int64_t items, Body&& body) {
    if (this->thread == 0) this->r.push();
    this->r.parallel_for(this->thread, this->index, items, body);
  }
  template <class Body>
  void each_token(Body&& body) {
    const int64_t tokens = this->r.batch.tokens;
    parallel_for((tokens + Training::kRows - 1) / Training::kRows, [&](int64_t item) {
      const int64_t end = (item + 1) * Training::kRows < tokens ? (item + 1) * Training::kRows : tokens;
      for (int64_t t = item * Training::kRows; t < end; ++t) body(t);
    });
  }
  float* row_buffer(int n) const { return this->r.row_buffer(this->thread, n); }
  static int64_t thread_bytes(const Training& r, const Fields&) { return r.row_buffers_bytes(); }
};

}  // namespace ckdist
