// The data of serving steps: programs that share one cache, their values, weights and the current batch.
//
// The number of tokens is data: buffers are sized once for the largest batch. Small batches take a path with fewer
// barriers (see `replicated`).
#pragma once
#include "comm/communicator.h"
#include "comm/row_exchange.h"
#include "kernels/kernels.h"
#include "runtime/batch.h"
#include "runtime/cache_arrays.h"
#include "runtime/executor.h"
#include "runtime/relative_bias.h"
#include "runtime/repacker.h"
#include "runtime/shares.h"
#include "runtime/slab.h"
#include "runtime/state_slots.h"
#include "runtime/traffic.h"

namespace ckdist {

// Rows of a value in floats.
struct FloatRows {
  float* at;
  int64_t stride;
  float* row(int64_t i) const { return at + i * stride; }
};

class Inference : public Executor {
 public:
  // `job`: all ranks. `stage`: the ranks of this rank's pipeline stage; `job` itself if there is one stage. `repacker`:
  // packs matrices that are not packed yet; null if all are packed.
  Inference(const ckdist_program& program, Communicator& job, Communicator& stage, Repacker* repacker,
            std::shared_ptr<Pool> pool);

  // The worker (runtime/worker.h) accepts every batch in its order, and runs it later in the same order.
  int64_t message_ints() const;  // maximum of a command
  int in_flight() const { return int(outgoing_.size()); }
  BatchView accept(const int32_t* message, int64_t ints);  // throws if this rank cannot run it
  void run(const BatchView& batch);
  void trace(Trace& trace);  // also the sums between hosts, in a lane of their own
  void trace_publish(const BatchView& batch, int64_t begin);
  bool test_outgoing();  // continues messages to the next stage; returns true if some are on their way
  void finish_outgoing();
  // Stops the model's ranks. Throws if a model file has changed: that is the cause, whichever rank noticed first.
  void give_up(const char* reason);
  const float* logits() { return ranks->gathered(); }
  const float* hidden() const { return hidden_.data(); }
  const uint8_t* kv_data() const { return kv_arena_->data(); }
  int64_t kv_bytes() const { return kv_bytes_; }
  ckdist_step_stats stats(bool reset);
  // Shows other ranks that this rank makes progress, so that they continue to wait for it.
  void count_step(int thread);
  // Files that keep blocks of the cache, or states. Only the thread of BlockCopier uses them, and the blocks and slots
  // that its commands name.
  int64_t slab_bytes(int kind) const { return kind == ckdist_slab_blocks ? stored_bytes_ : states.slot_bytes(); }
  void set_slab(int kind, int headers_file, int data_file, int64_t slots);
  const Slab* slab(int kind) const { return slabs_[kind].get(); }
  // Throws unless this rank has both places.
  void check_copy(const ckdist_block_copy& copy) const;
  int copy_block(const ckdist_block_copy& copy, bool into_cache);  // returns 0 or an errno
  void expert_rows(int64_t* out) const;                            // (layers, experts): counts of this host

  // In batches of at most this many rows every thread quantizes all rows itself, which saves a barrier. In larger
  // batches the threads divide the rows.
  static constexpr int kReplicatedRows = 2;
  static constexpr int kFewRows = 16;  // products of at most this many rows are limited by memory bandwidth
  // From this many rows per thread on, products are divided by rows and not by weights: a thread reads the rows that it
  // wrote from its own caches.
  static constexpr int64_t kThreadRows = 64;
  // From this many rows on, activations may be in strips.
  static constexpr int64_t kStripRows = 64;

  // State of the job.
  Communicator& communicator;               // all ranks of the job
  std::unique_ptr<StepCommunicator> ranks;  // the ranks of the stage
  const Kernels& kernels;
  // This rank's part of one layer's attention and cache.
  struct Layer {
    CacheShape cache{};
    int kv_heads = 0;
    const int32_t* heads_per_kv = nullptr;
    std::vector<int> first_head;  // query head, for each local kv-head
    int64_t head_bytes = 0, block_bytes = 0;
    int64_t block_stride = 0;  // from a block to the next one: a block has all layers
    CacheShape index{};        // keys that choose positions, if the layer has them
    int64_t index_offset = 0;  // of the index in a block, after the bytes of all heads
    int max_heads_per_kv = 1;
    uint8_t* blocks = nullptr;  // kv-head 0 in block 0

    uint8_t* kv(int kv_head) const { return cache.latent ? blocks : blocks + kv_head * head_bytes; }
    int64_t heads() const { return kv_heads ? first_head[kv_heads - 1] + heads_per_kv[kv_heads - 1] : 0; }
  };
  std::vector<Layer> layers;
  StateSlots states;
  RelativeBiases biases;
  // Cosines and sines of a token's rotation. `place`: the token's position in its sequence.
  Rope rotation(int table, int64_t token, int64_t place) const {
    const struct ckdist_rope& rope = program.ropes[table];
    const int64_t half = rope.dims / 2;
    const bool by_place = batch.positions == nullptr || rope.axes == nullptr;
    const float* const cos = by_place ? rope.cos + place * half : axes_[table].data() + token * rope.dims;
    return {cos, by_place ? rope.sin + place * half : cos + half, rope.dims, rope.interleaved != 0};
  }
  std::unique_ptr<RowExchange> host_rows;  // for plans that shard rows over hosts; else null

  // State of the batch.
  BatchView batch;
  int64_t first_token = 0, local_tokens = 0;       // this rank's tokens
  int64_t first_selected = 0, local_selected = 0;  // selected tokens among this rank's tokens
  bool packing = false;                            // the batch reads matrices that are not all packed
  Repacker* repacker() const { return repacker_; }

  // A sequence's first token in the batch, and its first entry in the block tables.
  struct Start {
    int64_t token, block;
  };
  std::vector<Start> starts;
  const int32_t* table_of(int sequence) const { return batch.block_tables + starts[size_t(sequence)].block; }
  // A token of the batch: its sequence, its index in the sequence's chunk, and its position.
  struct Token {
    int sequence, index;
    int64_t position;
  };
  Token token_of(int64_t token) const {
    int s = 0;
    while (s + 1 < batch.sequences && starts[size_t(s) + 1].token <= token) s++;
    const int index = int(token - starts[size_t(s)].token);
    return {s, index, int64_t{batch.chunks[s].first_position} + index};
  }
  // The position of a token of a sequence.
  int64_t position_of(int sequence, int64_t token) const {
    return batch.chunks[sequence].first_position + token - starts[size_t(sequence)].token;
  }

  // A token's row of a value that each rank has whole, or that is in the slots of the tokens' ranks.
  const float* row_of(int index, int64_t token) {
    return value(index).place == ckdist_place_tokens ? peer_row(index, token) : floats(index).row(token);
  }

  // If tokens are sharded: the first token of a local rank, and the local rank of a token.
  int64_t first_token_of(int rank) const { return (batch.tokens * rank + ranks->local_size - 1) / ranks->local_size; }
  int rank_of(int64_t token) const { return int(token * ranks->local_size / batch.tokens); }

  int64_t rows(const ckdist_step& step) const {
    return step.rows == ckdist_rows_tokens     ? local_tokens
           : step.rows == ckdist_rows_host     ? host_rows->count(ranks->host())
           : step.rows == ckdist_rows_selected ? batch.selected
                                               : local_selected;
  }
  // Index of a step's row 0 in values.
  int64_t first_row(const ckdist_step& step) const {
    return step.rows == ckdist_rows_host ? host_rows->first(ranks->host()) : 0;
  }
  // Index of row r of a step among the local tokens (all tokens if they are not sharded).
  int64_t token_row(const ckdist_step& step, int64_t r) const {
    return step.rows == ckdist_rows_tokens     ? r
           : step.rows == ckdist_rows_host     ? first_row(step) + r
           : step.rows == ckdist_rows_selected ? batch.selected_tokens[r]
                                               : batch.selected_tokens[first_selected + r] - first_token;
  }
  // Index of row r of a step among the batch's tokens.
  size_t batch_token(const ckdist_step& step, int64_t r) const {
    return size_t((step.rows == ckdist_rows_selected ? 0 : first_token) + token_row(step, r));
  }
  // The adapter of a row in a list of the batch, or -1, and its scale.
  const AdapterUse& adapter(const ckdist_step& step, int64_t list, int64_t r) const {
    return adapters_[size_t(list * program.max_tokens) + batch_token(step, r)];
  }
  // Calls visit(adapter, list, rows) for consecutive rows of a step with the same adapter, list after list.
  template <class Visit>
  void each_adapter(const ckdist_step& step, Range rows, Visit&& visit) const {
    for (int64_t list = 0; list < batch.adapter_lists; list++)
      for (int64_t begin = rows.begin, end = begin; begin < rows.end; begin = end) {
        const int32_t own = adapter(step, list, begin).slot;
        while (end < rows.end && adapter(step, list, end).slot == own) end++;
        if (own >= 0) visit(own, list, Range{begin, end});
      }
  }
  int64_t most_adapters() const { return std::min<int64_t>(program.adapters, ckdist_most_adapters); }
  // First product x A^T of a row for its adapter in a list. A row of value `index` has a place for each list.
  FloatRows low_rank(int index, int64_t list) {
    const FloatRows rows = floats(index);
    return {rows.at + list * (value(index).width / most_adapters()), rows.stride};
  }
  // True if every thread computes the activations of all rows itself. Sharded rows are never replicated.
  bool replicated(const ckdist_step& step) const {
    return rows(step) <= kReplicatedRows &&
           (step.rows == ckdist_rows_selected ||
            (step.rows == ckdist_rows_tokens && !plan->tokens_sharded && !plan->host_rows));
  }
  // The range of n rows that a thread computes. If n is large, boundaries are multiples of 16 rows, the unit of
  // products.
  int64_t row_begin(int thread, int64_t n) const {
    return thread == active() || n < kThreadRows * active() ? n * thread / active() : n * thread / active() / 16 * 16;
  }
  Range rows_of(int thread, int64_t n) const { return {row_begin(thread, n), row_begin(thread + 1, n)}; }
  // A thread's part of items that are divided evenly.
  Range part_of(int thread, int64_t items) const {
    return {items * thread / active(), items * (thread + 1) / active()};
  }

  // The rows that this rank exchanges with other stages: its local tokens if tokens are sharded; its part of its host's
  // rows if rows are sharded over hosts; else its part of the batch's tokens.
  Range stage_rows() const {
    if (plan->host_rows) {
      const int64_t first = host_rows->first(ranks->host()), n = host_rows->count(ranks->host());
      const auto begin = [&](int place) { return first + n * place / ranks->local_size; };
      return {begin(ranks->local_rank), begin(ranks->local_rank + 1)};
    }
    const auto begin = [&](int rank) { return (batch.tokens * rank + ranks->size - 1) / ranks->size; };
    return plan->tokens_sharded ? Range{0, local_tokens} : Range{begin(ranks->rank), begin(ranks->rank + 1)};
  }
  float* outgoing() const { return program.outgoing[turn()]; }  // buffer of the rows to send
  void send_rows(int64_t floats);
  void receive_rows(float* rows, int64_t floats, int step);
  // After the last step: gathers the logits of `rows` rows.
  void end_batch(int64_t rows, int step);

  FloatRows floats(int value);
  // A row of a value in the slot of the rank that has the token.
  const float* peer_row(int index, int64_t token) const {
    const ckdist_value& v = value(index);
    const int rank = rank_of(token);
    return peers_[v.offset][rank] + (token - first_token_of(rank)) * v.width + v.lead;
  }
  const float* peer_slot(const ckdist_value& v, int rank) const { return peers_[v.offset][rank]; }
  // Row 0 of the activations that norm_quantize made for steps of the same rows.
  uint8_t* activations(int thread, const ckdist_step& step, int index) {
    const ckdist_value& a = value(index);
    if (replicated(step)) return buffers_[thread].activations[a.format];
    return arena_->data() + a.offset + first_row(step) * a.stride;
  }
  // True if norm_quantize made the activations of the step's rows in strips.
  bool in_strips(const ckdist_step& step, int index) const {
    return facts_[size_t(plan - program.plans)].strips[size_t(index)] && rows(step) >= kStripRows;
  }
  const Weight& weight(int index) const { return *static_cast<const Weight*>(plan->matrices[index]); }
  const Matrix& matrix(int index) const { return weight(index).matrix; }
  const float* vector(int index) const { return plan->vectors[index]; }

  // Room for kReplicatedRows rows that all threads write together. Every thread calls it in the same steps: the room
  // alternates, so that a thread may still read the rows of the call before.
  float* next_shared_rows(int thread) { return shared_rows_[buffers_[thread].shared_turn ^= 1]; }
  uint8_t* slice(int thread) { return buffers_[thread].slice; }  // room for a slice that is not packed yet
  // Multiplies `rows` rows of activations by all tiles of a matrix, as the plan's tokens are multiplied. `strips`: the
  // rows are in strips.
  void multiply(int thread, const Matrix& matrix, const uint8_t* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, bool strips = false) const {
    const LinearKernel& kernel = kernels.linear[int(matrix.type)];
    if (strips || (plan->prompts && kernel.prompt_activation != kernel.activation))
      kernel.multiply_prompt(
          {matrix, 0, matrix.tile_count(), x, x_stride, strips, rows, y, y_stride, buffers_[thread].room});
    else kernel.multiply(matrix, 0, matrix.tile_count(), x, x_stride, rows, y, y_stride);
  }
  // The same for both matrices of a gate, with rows in strips: y = function(gate) * up, for tiles of both. The result
  // is not written before it is complete.
  void multiply_gated(int thread, const Matrix& gate, const Matrix& up, Range tiles, GateFunction function,
                      const uint8_t* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) const {
    kernels.linear[int(gate.type)].multiply_prompt({gate, tiles.begin, tiles.end, x, x_stride, true, rows, y, y_stride,
                                                    buffers_[thread].room, up.tiles, function,
                                                    kernels.elementwise.gated});
  }
  // Number of parts into which the columns of a matrix are divided, and one of them (see `column_parts`).
  int parts_of(int matrix) const { return parts_[size_t(plan - program.plans)][size_t(matrix)]; }
  Matrix columns(const Matrix& w, int part, int parts) const {
    const Range own = part_columns(w.cols, part, parts);
    const uint8_t* const tiles = w.tiles + kernels.linear[int(w.type)].tile_bytes(own.begin);
    return {w.type, w.rows, own.end - own.begin, w.tile_bytes, tiles, own.begin, w.cols};
  }
  int most_threads() const { return most_threads_; }
  void count_moved(int thread, int64_t bytes) { buffers_[thread].moved += bytes; }
  // Adds the bytes of the experts that a step chose. Only the step's first thread calls it.
  void count_experts(int64_t bytes) { experts_read_ += bytes; }

  // Row 0 of a value in the arena.
  uint8_t* step_activations(int index) { return arena_->data() + value(index).offset; }

  // A counter that starts from 0 in every step, for synchronizing the threads of a step. `which` is less than the
  // number of counters that the step's kind needs.
  class Counter {
   public:
    // Returns the count before the addition.
    uint32_t add(uint32_t step, uint32_t n) {
      uint64_t was = value_.load(std::memory_order_relaxed), count;
      do count = uint32_t(was >> 32) == step ? uint32_t(was) : 0;
      while (!value_.compare_exchange_weak(was, uint64_t(step) << 32 | (count + n), std::memory_order_acq_rel));
      return uint32_t(count);
    }
    uint32_t get(uint32_t step) const {
      const uint64_t is = value_.load(std::memory_order_acquire);
      return uint32_t(is >> 32) == step ? uint32_t(is) : 0;
    }

   private:
    std::atomic<uint64_t> value_{0};  // number of the step (upper half) and its count
  };
  Counter& counter(int which) { return step_counters_[which]; }
  uint32_t step_number(int index) const { return runs_ * uint32_t(most_steps_) + uint32_t(index) + 1; }

  // Counters of rows per expert of a layer; null if this rank does not count. If ranks of a host compute the same rows,
  // only the first counts.
  int64_t* expert_counters(int layer) const {
    if (!plan->tokens_sharded && ranks->local_rank != 0) return nullptr;
    return ranks->counters(ranks->local_rank) + int64_t{layer} * program.experts;
  }

  // Runs work(item) for items that are divided evenly over the groups of threads (runtime/pool.h). The next free thread
  // of a group takes the group's next item, then items that other groups have left. A step may do so in two phases.
  template <class Work>
  void take_items(int thread, int index, int64_t items, Work&& work, int phase = 0) {
    take_shares(
        pool_->group_of(thread), groups(), [&](int group) { return pool_->share_begin(group, items); },
        [&](int group) -> auto& { return counters_[(phase * threads() + group) * most_steps_ + index]; }, work);
  }
  int groups() const { return pool_->groups(); }
  // Runs work(item) for items that are divided evenly over the threads. A thread that has finished takes items that
  // others have left.
  template <class Work>
  void for_each_item(int thread, int index, int64_t items, Work&& work) {
    take_shares(
        thread, active(), [&](int owner) { return items * owner / active(); },
        [&](int owner) -> auto& { return counters_[owner * most_steps_ + index]; }, work);
  }
  // Ends a step that wrote `rows` rows of the value `out`: exchanges them if other ranks read them, else a barrier of
  // this rank's threads.
  void finish(int thread, int index, int out, int64_t rows);

  // Chunks of rows in which the sum of a value goes between hosts. They are the same on every host, so they do not
  // depend on threads. The first thread begins chunks while the threads still compute later rows; `finish` begins the
  // others and waits for all.
  struct SumChunks {
    int count;
    int64_t rows;  // of the value that this rank computes
    int64_t begin(int chunk) const { return chunk == count ? rows : rows * chunk / count / 16 * 16; }
  };
  // One chunk if the value is small, or not summed between hosts.
  SumChunks sum_chunks(int out) const;
  // Begins all chunks before `until`, and makes progress on those that travel. Not at the same time on two threads.
  void begin_sum(int index, int out, int until, Idle idle = {});

 private:
  // A step without prompts keeps at most 1 / kKeptShare of the bytes it reads as packed slices. A step with prompts
  // keeps all slices that it packs.
  static constexpr int64_t kKeptShare = 16;

  struct alignas(64) ThreadBuffers {  // memory of one thread that lasts over steps
    uint8_t* activations[3];          // kReplicatedRows rows for each format
    uint8_t *slice, *room;            // room: of LinearKernel::multiply_prompt; null if no plan needs it
    int shared_turn = 0;
    int64_t moved = 0;  // bytes read from other ranks' memory in this batch
  };

  void read_lists();
  void make_cache();
  void make_buffers();
  std::vector<bool> values_in_strips() const;  // of the plan
  void reserve_exchange();
  void divide_columns();
  void begin(const BatchView& batch);
  void read_positions();
  void read_adapters();
  void count_step(double seconds);
  void replay(int thread);
  void trace_batch(int thread, int64_t begin);
  void trace_sum(int index, int arrived);
  StepCommunicator& everyone() const { return job_ ? *job_ : *ranks; }
  size_t turn() const { return runs_ % outgoing_.size(); }

  Communicator& stage_;
  std::unique_ptr<StepCommunicator> job_;  // all ranks; null if `ranks` are all ranks
  // For each batch that may be in flight, rows on their way to the next stage, which need progress.
  std::vector<Channel::Pending> outgoing_;
  Repacker* const repacker_;
  struct PlanFacts {
    int64_t bytes = 0;          // of the matrices that a step reads
    int token_steps = 0;        // steps before those of selected rows only
    bool needs_firsts = false;  // attends to an encoder's output
    bool needs_rows = false;    // reads a row of the batch's embeddings for each token
    std::vector<bool> strips;   // for each value: many rows of it are in strips
  };
  std::vector<PlanFacts> facts_;  // of each plan
  int most_steps_ = 0;            // largest number of steps of a plan, rounded up to whole cache lines of counters
  uint32_t runs_ = 0;             // number of batches so far
  std::unique_ptr<Counter[]> step_counters_;
  int64_t kv_bytes_ = 0;
  std::optional<Arena> kv_arena_, buffer_arena_;
  int64_t stored_bytes_ = 0;  // bytes of one block of all layers
  std::unique_ptr<Slab> slabs_[ckdist_slab_kinds];
  std::vector<ThreadBuffers> buffers_;
  float* shared_rows_[2] = {};
  std::vector<float> hidden_;         // (max_outputs, hidden)
  std::vector<AdapterUse> adapters_;  // of the batch's tokens, (most_adapters, max_tokens)
  // For each rotation with axes: cosines, then sines, of the batch's tokens, (max_tokens, dims). Else empty.
  std::vector<float> axes_[std::size(ckdist_program{}.ropes)];
  std::vector<const float*> peers_[kSlots];  // slots of the ranks that share memory
  // (2 phases, threads, most_steps): next item of each step that shares its items dynamically. Items that groups divide
  // use the first rows of each phase.
  std::unique_ptr<std::atomic<int64_t>[]> counters_;
  int most_threads_ = 0;                 // of a rank of this stage
  std::vector<std::vector<int>> parts_;  // (plans, matrices)
  int begun_ = 0, arrived_ = 0;          // chunks of the current sum over hosts
  int64_t chunk_begin_[StepCommunicator::kMaxChunks], chunk_end_ = 0;
  TraceLane* sums_lane_ = nullptr;
  int64_t sent_before_ = 0;   // bytes sent to other hosts before the counts were reset
  Traffic traffic_;           // traffic of plan 0, which decodes
  int64_t experts_read_ = 0;  // bytes in this batch
  int64_t prefilled_ = 0;     // end of the batch before, if it was a token-parallel prefill; else 0
};

// One thread's run of a serving step.
template <class Fields>
struct InferenceRun : StepRun<Inference, Fields> {
  // Runs body(row) for this thread's range of n rows.
  template <class Body>
  void each_row(int64_t n, Body&& body) const {
    const Range own = this->r.rows_of(this->thread, n);
    for (int64_t row = own.begin; row < own.end; row++) body(row);
  }
  // Runs body(item) for this thread's part of the items.
  template <class Body>
  void each_own_item(int64_t items, Body&& body) const {
    const Range own = this->r.part_of(this->thread, items);
    for (int64_t item = own.begin; item < own.end; item++) body(item);
  }
};

}  // namespace ckdist
