// The data of training steps: a lowered loss with its gradients, parameters, packed matrices and the batch.
//
// Work is divided into items, which free threads take. An item's results depend only on the batch. Sums over tokens are
// computed in chunks of fixed size, which are added in order. So the results are identical bit for bit in every run and
// for any number of threads.
#pragma once
#include "api/training_api.h"
#include "comm/communicator.h"
#include "core/error.h"
#include "kernels/kernels.h"
#include "runtime/executor.h"
#include "runtime/sliced_matrix.h"

namespace ckdist {

// Number of parts of `size` that n has; the last may be smaller.
constexpr int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
constexpr int64_t tiles_of(int64_t rows) { return parts_of(rows, kTileRows); }
constexpr int64_t round16(int64_t n) { return parts_of(n, 16) * 16; }

// Rows of elements that products read.
struct Operand {
  uint8_t* at;
  int64_t stride;
  uint8_t* row(int64_t token) const { return at + token * stride; }
};

class Training : public Executor {
 public:
  // `data`: the ranks over which gradients are summed. `tensor`: the ranks that share the tensors. `stages`: one rank
  // of each stage. `sequence`: the ranks that divide each batch's tokens. Each may be null.
  Training(const ckdist_program& program, Communicator* data, Communicator* tensor, Communicator* stages,
           Communicator* sequence, std::shared_ptr<Pool> pool);

  // Returns the sum of the losses.
  double run(const ckdist_training_batch& batch, const ckdist_training_pass& pass);
  void flush();  // returns when other stages have received all that was sent
  // Seconds by kind of step; the last element is packing.
  std::array<double, ckdist_step_kinds + 1> times() const;
  std::array<int64_t, 3> bytes() const {
    return {plan->arena_bytes + program.kept_bytes, workspace_bytes(), frozen_bytes_};
  }

  static constexpr int kRows = 16;       // tokens of one item of row-wise work
  static constexpr int kSumRows = 64;    // tokens whose contributions to a vector are summed in one chunk
  static constexpr int kColumns = 64;    // columns of one item that transposes or adds columns
  static constexpr int kRowBuffers = 4;  // rows in floats that a thread reads or writes at once

  struct Batch {
    std::vector<int32_t> token_ids, targets, positions;
    std::vector<int32_t> starts;          // of the sequences, in the batch of all ranks that divide it
    std::vector<int32_t> learned;         // tokens whose logits are computed, in order
    std::vector<int32_t> given;           // of each token: its place in the batch as it was given
    std::vector<float> weights;           // of each token's loss; empty: 1
    std::vector<int32_t> teacher_ids;     // (tokens, choices)
    std::vector<float> teacher_logprobs;  // (tokens, choices)
    std::vector<uint32_t> keys;           // of each token's dropout; empty: nothing is dropped
    int64_t choices = 0;
    std::vector<int32_t> best;  // token with the largest logit of each token; empty: not wanted
    int64_t tokens = 0;
  };

  const Kernels& kernels;
  const bool narrow_values;  // true if products read bfloat16
  const PackKernel& packing;
  const ProductKernel& product;
  const Type tile_type;  // type of packed tiles
  const ProductKernel& scratch_product;
  Batch batch;
  std::vector<double> losses;  // one for each token, without its weight
  double balance = 0;          // load-balancing loss * number of targets

  float weight(int64_t token) const { return batch.weights.empty() ? 1 : batch.weights[size_t(token)]; }  // of its loss
  // The i-th of the tokens whose logits are computed; true if logits of all tokens are computed.
  int64_t learned(int64_t i) const { return all_learned() ? i : batch.learned[i]; }
  bool all_learned() const { return int64_t(batch.learned.size()) == batch.tokens; }

  Operand operand(int index, int64_t token = 0) const {
    const ckdist_value& v = value(index);
    return {(v.kept ? kept_ : arena_->data()) + v.offset + token * v.stride, v.stride};
  }
  // A head of a row, for heads of `width` elements.
  Operand head_of(int index, int64_t token, int64_t head, int64_t width) const {
    const Operand o = operand(index, token);
    return {o.at + head * width * element_bytes(), o.stride};
  }
  bool is_operand(int index) const { return value(index).place == ckdist_place_activations; }
  bool narrow(int index) const { return narrow_values && is_operand(index); }
  int64_t width(int index) const { return value(index).width; }
  int64_t bytes_of(int index) const { return narrow(index) ? 2 : 4; }  // bytes of an element
  int64_t row_bytes(int index) const { return value(index).room * bytes_of(index); }
  // Distance between separate copies of rows, an odd number of cache lines.
  int64_t row_stride(int index) const { return ((row_bytes(index) + 63) / 64 | 1) * 64; }
  Row row(int index, int64_t token) const { return {operand(index, token).at, narrow(index)}; }
  // A row of a float32 value.
  float* floats(int index, int64_t token) const { return reinterpret_cast<float*>(operand(index, token).at); }
  // A row as floats: in place, or converted in `buffer`.
  const float* read(int index, int64_t token, float* buffer) const {
    if (!narrow(index)) return floats(index, token);
    packing.widen(operand(index, token).at, width(index), buffer);
    return buffer;
  }
  // Columns [column, column + n) of a row as floats.
  void copy(int index, int64_t token, int64_t column, int64_t n, float* to) const {
    const uint8_t* const from = operand(index, token).at + column * bytes_of(index);
    if (narrow(index)) packing.widen(from, n, to);
    else std::copy_n(reinterpret_cast<const float*>(from), n, to);
  }
  // The address for writing a row as floats. Call `written` afterwards.
  float* write(int index, int64_t token, float* buffer) const { return narrow(index) ? buffer : floats(index, token); }
  void written(int index, int64_t token, const float* row) const { store(index, token, 0, row, width(index)); }
  // Stores columns [column, column + n) of a row, and zeros after the last column. If x is already the row itself, only
  // writes the zeros.
  void store(int index, int64_t token, int64_t column, const float* x, int64_t n) const;
  void pad(int index, int64_t token) const;  // writes zeros after the width of an operand

  const ckdist_parameter& shape(int index) const { return plan->parameters[index]; }
  const Weight* packed_parameter(int index) const { return static_cast<const Weight*>(shape(index).matrix); }
  // A parameter that is stored as bfloat16.
  bool is_narrow(int index) const {
    return program.narrow_parameters && shape(index).offset < program.trained_floats && !packed_parameter(index);
  }
  // False if the rows of a matrix are unpacked to be read.
  bool in_place(int index) const { return !packed_parameter(index) && !is_narrow(index); }
  // A parameter whose steps read it as floats: vectors, and the few taps of convolutions.
  bool is_small(int index) const { return shape(index).rows == 1 || shape(index).cols <= kTileRows; }
  // A small parameter, or one that is stored as floats.
  const float* parameter(int index) const {
    if (is_narrow(index) && !is_small(index)) fail(Status::native, "parameter %d is not stored as floats", index);
    if (is_narrow(index)) return vectors_.data() + vector_at_[size_t(index)];
    return program.parameter_arena + (shape(index).offset - (program.narrow_parameters ? program.trained_floats : 0));
  }
  // Packs rows of x transposed, as tiles of `columns` rows, `tile_bytes` from tile to tile.
  void pack_columns(const Operand& x, int64_t rows, int64_t columns, uint8_t* tiles, int64_t tile_bytes) const;
  // Rows [begin, begin + n) of a matrix: in place, or unpacked in `buffer`, (n, cols).
  const float* parameter_rows(int index, int64_t begin, int64_t n, float* buffer) const;
  float* gradient(int index) const { return program.gradient_arena + shape(index).offset; }
  const struct ckdist_pack& pack(int index) const { return plan->packs[index]; }
  const Matrix& packed(int index) const { return packed_[index]; }  // without tiles if each step packs it
  // True if a product is added to the gradient, false if it overwrites the gradient.
  bool adds(bool fresh) const { return !(pass_.clear && fresh); }

  // Columns of activations that a product reads: whole vectors of two bfloat16 each.
  static int64_t padded(int64_t cols) { return (cols + 31) / 32 * 32; }
  // Bytes between rows of elements: an odd number of cache lines, so that rows do not share cache sets.
  static int64_t stride(int64_t cols, int64_t bytes) { return ((padded(cols) * bytes + 63) / 64 | 1) * 64; }
  int64_t column_bytes() const { return tile_type == Type::bf16 ? 32 : 64; }
  int64_t tile_bytes(int64_t cols) const { return round16(cols) * column_bytes(); }
  int64_t element_bytes() const { return narrow_values ? 2 : 4; }  // of values that products read
  // Bytes of an element of a step's temporary operands, which are multiplied with tiles.
  int64_t scratch_bytes() const { return tile_type == Type::bf16 ? 2 : 4; }
  Matrix matrix(int64_t rows, int64_t cols, const uint8_t* tiles) const {
    return {tile_type, rows, cols, tile_bytes(cols), tiles};
  }
  static int64_t bytes_of(const Matrix& m) { return m.tile_count() * m.tile_bytes; }

  float* row_buffer(int thread, int n) const { return reinterpret_cast<float*>(memory(thread)) + n * row_floats_; }
  int64_t row_buffers_bytes() const { return kRowBuffers * row_floats_ * 4; }
  void count_packing(double seconds) { pack_seconds_ += seconds; }

  void begin_reduce(const ckdist_reduce_gradients_step& step);
  void place_parameters(const ckdist_place_parameters_step& step);
  int tensor_ranks() const { return tensor_ ? tensor_->size : 1; }
  // The ranks that divide each batch, and this one's number. Chunk c of the batch (see training_api.h) begins at c *
  // chunk_tokens().
  int sequence_ranks() const { return sequence_ ? sequence_->size : 1; }
  int sequence_rank() const { return sequence_ ? sequence_->rank : 0; }
  int64_t chunk_tokens() const { return batch.tokens / 2; }
  int64_t own_chunk(int64_t i) const { return i ? 2 * sequence_ranks() - 1 - sequence_rank() : sequence_rank(); }
  int64_t most_keys() const { return program.max_tokens * sequence_ranks(); }  // of a sequence
  // Gather n bytes of every rank, in rank order.
  void gather_sequence(const void* own, int64_t n, void* all) const { gather(*sequence_, own, n, all); }
  void gather_over_tensor(const void* own, int64_t n, void* all) const { gather(*tensor_, own, n, all); }
  // Sums `all`, n floats for each rank, over the ranks. Each gets its own part.
  void scatter_sequence(const float* all, int64_t n, float* own) const;
  void sum_over_tensor(float* x, int64_t n) const;
  // The range of the batch's rows that this rank exchanges with other stages.
  std::pair<int64_t, int64_t> own_rows(bool shared) const {
    const auto begin = [&](int64_t rank) { return batch.tokens * rank / tensor_ranks(); };
    if (!shared) return {0, batch.tokens};
    return {begin(tensor_->rank), begin(tensor_->rank + 1)};
  }
  // The buffer of the next message's rows. make_place() waits until its earlier message has been received.
  float* outgoing() const { return program.outgoing[turn_]; }
  void make_place();
  void send(int stage, int tag, int64_t floats);
  void receive(int stage, int tag, float* rows, int64_t floats);
  void push();  // makes progress on messages that are on their way

 private:
  static constexpr int kLeastSaved =
      8;  // if fewer than 1 in kLeastSaved tokens have no target, logits of all tokens are computed

  // ZeRO: the floats of [begin, end) that a rank of data_ owns.
  struct Share {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
  };
  Share share_of(int rank, int64_t begin, int64_t end) const;
  std::vector<int64_t> sizes_of_shares(int64_t begin, int64_t end, int64_t factor) const;  // by rank, times `factor`
  static void gather(Communicator& ranks, const void* own, int64_t n, void* all);
  void scatter(Collectives& c, const ckdist_reduce_gradients_step& step) const;

  void make_packs();
  void widen_vectors(int64_t begin, int64_t end);
  // The trained parameters from this float on.
  uint8_t* trained_at(int64_t offset) const {
    return program.narrow_parameters ? reinterpret_cast<uint8_t*>(program.narrow_parameters + offset)
                                     : reinterpret_cast<uint8_t*>(program.parameter_arena + offset);
  }
  void check(const ckdist_training_batch& batch) const;
  void take(const ckdist_training_batch& batch);
  void place_divided(const ckdist_training_batch& batch);
  void replay(int thread);
  void clear(int thread);

  Communicator *const data_, *const tensor_, *const stages_, *const sequence_;  // null if there are no other ranks
  std::vector<Matrix> packed_;
  // The packs that are made once. Packs of one parameter are consecutive, so that it is read from memory once.
  std::vector<int32_t> frozen_;
  int64_t frozen_bytes_ = 0, row_floats_ = 0;
  std::vector<float> vectors_;      // trained vectors as floats, if parameters are bfloat16
  std::vector<int64_t> vector_at_;  // of each parameter: its place in vectors_
  std::optional<Arena> kept_arena_, frozen_arena_;
  uint8_t* kept_ = nullptr;  // kept values of the batch
  ckdist_training_pass pass_{};
  bool frozen_packed_ = false;
  std::vector<std::shared_ptr<Communicator::Operation>> operations_;
  struct Gather {
    int64_t begin, end;
    std::shared_ptr<Communicator::Operation> operation;
  };
  std::vector<Gather> gathers_;                                 // of parameters
  size_t gathered_ = 0;                                         // the first of them that are complete
  std::vector<std::shared_ptr<Communicator::Operation>> sent_;  // ring: one for each buffer of program.outgoing
  size_t turn_ = 0;
  double pack_seconds_ = 0;
};

// One thread's run of a training step.
template <class Fields>
struct TrainingRun : StepRun<Training, Fields> {
  // Runs body(item) for every item on the next free thread. Ends with a barrier.
  template <class Body>
  void parallel_for(int64_t items, Body&& body) {
    if (this->thread == 0) this->r.push();
    this->r.parallel_for(this->thread, this->index, items, body);
  }
  // Runs body(begin, end) for the parts of [0, n), `size` items each, in the same way.
  template <class Body>
  void each_part(int64_t n, int64_t size, Body&& body) {
    parallel_for(parts_of(n, size), [&](int64_t part) { body(part * size, std::min<int64_t>((part + 1) * size, n)); });
  }
  template <class Body>
  void each_token(Body&& body) {
    each_part(this->r.batch.tokens, Training::kRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) body(t);
    });
  }
  float* row_buffer(int n) const { return this->r.row_buffer(this->thread, n); }
  static int64_t thread_bytes(const Training& r, const Fields&) { return r.row_buffers_bytes(); }
};

// A training step whose rows are independent of each other. `Run` has token(t).
template <class Run, class Fields>
struct TokenRun : TrainingRun<Fields> {
  void run() {
    this->each_token([&](int64_t t) { static_cast<Run*>(this)->token(t); });
  }
};

}  // namespace ckdist
