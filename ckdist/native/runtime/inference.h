// What the steps of serving work on: programs that share one cache, their values, weights and the batch that runs.
//
// The number of tokens is data: buffers are sized once for the largest batch, and small batches take a path with fewer
// barriers (see `replicated`).
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "comm/row_exchange.h"
#include "core/range.h"
#include "kernels/kernels.h"
#include "runtime/batch.h"
#include "runtime/executor.h"
#include "runtime/relative_bias.h"
#include "runtime/repacker.h"
#include "runtime/state_slots.h"
#include "runtime/traffic.h"

namespace ckdist {

class Inference : public Executor {
 public:
  // `stage`: of the ranks of this rank's stage, `job` itself where there is one. `repacker`: of matrices that are not
  // all packed yet; null where all are.
  Inference(const ckdist_program& program, Communicator& job, Communicator& stage, Repacker* repacker,
            std::shared_ptr<Pool> pool);

  void publish(const int32_t* message, int64_t ints);
  void run();
  void work();
  void stop();
  // Rank 0, while no batch is in flight: what stats() gives on every rank.
  void reports(ckdist_step_stats* out);
  const float* logits() { return ranks->gathered(); }
  const float* hidden() const { return hidden_.data(); }
  const uint8_t* kv_data() const { return kv_arena_->data(); }
  int64_t kv_bytes() const { return kv_bytes_; }
  ckdist_step_stats stats(bool reset);
  void count_step(int thread);           // who waits for this rank goes on waiting
  void expert_rows(int64_t* out) const;  // (layers, experts), of this host

  // Batches of at most this many rows are quantized by every thread for itself, which saves a barrier; larger ones once
  // for all.
  static constexpr int kReplicatedRows = 2;
  static constexpr int kFewRows = 16;  // products of at most so many are bound by memory
  // From so many rows a thread on, products are divided by rows and not by weights: what a thread wrote it reads again,
  // from its own caches.
  static constexpr int64_t kThreadRows = 64;

  // Of the job and the program.
  const ckdist_program program;
  Communicator& communicator;               // of the job
  std::unique_ptr<StepCommunicator> ranks;  // of the stage
  const Kernels& kernels;
  // What the rank has of one layer's attention and cache.
  struct Layer {
    CacheShape cache;
    int kv_heads;
    const int32_t* heads_per_kv;
    std::vector<int> first_head;  // of each local kv-head
    int64_t head_bytes, block_bytes;
    int max_heads_per_kv;
    uint8_t* blocks;  // of kv-head 0

    uint8_t* kv(int kv_head) const { return cache.latent ? blocks : blocks + kv_head * head_bytes; }
    int64_t heads() const { return kv_heads ? first_head[kv_heads - 1] + heads_per_kv[kv_heads - 1] : 0; }
  };
  std::vector<Layer> layers;
  StateSlots states;
  RelativeBiases biases;
  std::unique_ptr<RowExchange> host_rows;  // of plans in which hosts share rows out

  // Of the batch.
  BatchView batch;
  const ckdist_execution_plan* plan = nullptr;
  int64_t first_token = 0, local_tokens = 0;       // of the batch's tokens this rank's: the first, and how many
  int64_t first_selected = 0, local_selected = 0;  // of its selected tokens those among them
  bool packing = false;                            // it reads matrices that are not all packed
  Repacker* repacker() const { return repacker_; }

  // Of the batch's tokens the first that is a local rank's own, where they are sharded; and whose a token is.
  int64_t first_token_of(int rank) const { return (batch.tokens * rank + ranks->local_size - 1) / ranks->local_size; }
  int rank_of(int64_t token) const { return int(token * ranks->local_size / batch.tokens); }

  int64_t rows(const ckdist_step& step) const {
    return step.rows == ckdist_rows_tokens     ? local_tokens
           : step.rows == ckdist_rows_host     ? host_rows->count(ranks->host())
           : step.rows == ckdist_rows_selected ? batch.selected
                                               : local_selected;
  }
  // Where values have row 0 of a step.
  int64_t first_row(const ckdist_step& step) const {
    return step.rows == ckdist_rows_host ? host_rows->first(ranks->host()) : 0;
  }
  // The row among local tokens, or all, of row r of a step.
  int64_t token_row(const ckdist_step& step, int64_t r) const {
    return step.rows == ckdist_rows_tokens     ? r
           : step.rows == ckdist_rows_host     ? first_row(step) + r
           : step.rows == ckdist_rows_selected ? batch.selected_tokens[r]
                                               : batch.selected_tokens[first_selected + r] - first_token;
  }
  // Every thread makes the activations of all rows for itself. Sharded rows are for several shards.
  bool replicated(const ckdist_step& step) const {
    return rows(step) <= kReplicatedRows &&
           (step.rows == ckdist_rows_selected ||
            (step.rows == ckdist_rows_tokens && !plan->tokens_sharded && !plan->host_rows));
  }
  // Of n rows those of a thread: where there are many, in the units of products.
  int64_t row_begin(int thread, int64_t n) const {
    return thread == active() || n < kThreadRows * active() ? n * thread / active() : n * thread / active() / 16 * 16;
  }
  Range rows_of(int thread, int64_t n) const { return {row_begin(thread, n), row_begin(thread + 1, n)}; }

  // Of rows that go from stage to stage those that this rank sends, or receives: of its local tokens where tokens are
  // sharded, of its host's where hosts share rows out, else of the batch's tokens, shared out among the ranks.
  Range stage_rows() const {
    if (plan->host_rows) {
      const int64_t first = host_rows->first(ranks->host()), n = host_rows->count(ranks->host());
      const auto begin = [&](int place) { return first + n * place / ranks->local_size; };
      return {begin(ranks->local_rank), begin(ranks->local_rank + 1)};
    }
    const auto begin = [&](int rank) { return (batch.tokens * rank + ranks->size - 1) / ranks->size; };
    return plan->tokens_sharded ? Range{0, local_tokens} : Range{begin(ranks->rank), begin(ranks->rank + 1)};
  }
  float* outgoing() const { return program.outgoing[turn()]; }  // where rows to be sent are put
  void send_rows(int64_t floats);
  void receive_rows(float* rows, int64_t floats, int step);
  void end_batch(int64_t rows, int step);  // all steps are done; of the logits, or no, rows

  const ckdist_value& value(int index) const { return plan->values[index]; }
  float* floats(int value, int64_t* stride);               // row 0 of a float value, and the floats from row to row
  const float* peer_row(int index, int64_t token) const {  // of a value in the slot of the token's rank
    const ckdist_value& v = value(index);
    const int rank = rank_of(token);
    return peers_[v.offset][rank] + (token - first_token_of(rank)) * v.width + v.lead;
  }
  const float* peer_slot(const ckdist_value& v, int rank) const { return peers_[v.offset][rank]; }
  static int64_t activation_stride(const ckdist_value& v) {
    return ActivationRow::bytes(ActivationFormat(v.format), v.width);
  }
  // Row 0 of activations, as norm_quantize left them for steps of the same rows.
  uint8_t* activations(int thread, const ckdist_step& step, int index) {
    const ckdist_value& a = value(index);
    if (replicated(step)) return workers_[thread].activations[a.format];
    return arena_->data() + a.offset + first_row(step) * activation_stride(a);
  }
  const Weight& weight(int index) const { return *static_cast<const Weight*>(plan->matrices[index]); }
  const Matrix& matrix(int index) const { return weight(index).matrix; }
  const float* vector(int index) const { return plan->vectors[index]; }

  uint8_t* slice(int thread) { return workers_[thread].slice; }  // room for a slice that was not packed yet
  CopyEngine& engine(int thread) { return *workers_[thread].engine; }
  void count_moved(int thread, int64_t bytes) { workers_[thread].moved += bytes; }
  // Bytes of the experts that a step chose; of its first thread.
  void count_experts(int64_t bytes) { experts_read_ += bytes; }

  // The row of a value in the arena or of activations that stands for the first of a rank's tokens, or for whatever the
  // threads of one step say.
  uint8_t* step_activations(int index) { return arena_->data() + value(index).offset; }

  // Counts from 0 in every step, for what threads of a step tell one another; `which` is below what its kind asked for.
  class Counter {
   public:
    // What it was before.
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
    std::atomic<uint64_t> value_{0};  // the step that counts, and its count
  };
  Counter& counter(int which) { return step_counters_[which]; }
  uint32_t step_number(int index) const { return runs_ * uint32_t(most_steps_) + uint32_t(index) + 1; }

  // Rows by expert of a layer, where this rank is one that counts them: ranks of a host with the same rows leave it to
  // the first.
  int64_t* expert_counters(int layer) const {
    if (!plan->tokens_sharded && ranks->local_rank != 0) return nullptr;
    return ranks->counters(ranks->local_rank) + int64_t{layer} * program.experts;
  }

  // The next item of a step whose items go to whichever thread is free.
  int64_t next_item(int index) { return counters_[index].fetch_add(1); }
  // work(item) for items that are divided evenly over the threads; who is done takes of what others have left.
  template <class Work>
  void for_each_item(int thread, int index, int64_t items, Work&& work) {
    for (int o = 0; o < active(); o++) {
      const int owner = (thread + o) % active();
      const int64_t begin = items * owner / active(), end = items * (owner + 1) / active();
      for (int64_t i; (i = begin + counters_[owner * most_steps_ + index].fetch_add(1)) < end;) work(i);
    }
  }
  // The end of a step that wrote `rows` rows of the value `out`: what other ranks are to read is met for over all of
  // them, anything else among this rank's threads.
  void finish(int thread, int index, int out, int64_t rows);

 private:
  static constexpr int kMaxPlans = 8;
  // Of what a step without prompts reads it packs at most one part in so many for good; a step with prompts packs all
  // that it meets.
  static constexpr int64_t kKeptShare = 16;

  struct alignas(64) Worker {  // one thread's memory beside its steps'
    uint8_t* activations[3];   // kReplicatedRows rows per format
    uint8_t* slice;
    std::unique_ptr<CopyEngine> engine;  // of slices that are kept; null where all are packed
    int64_t moved = 0;                   // bytes read of other ranks' memory in this batch
  };

  void make_lists();
  void make_cache();
  void make_workers();
  void reserve_exchange();
  BatchView accepted(const int32_t* message, int64_t ints);
  void run(const BatchView& batch);
  void begin(const BatchView& batch);
  void count_step(double seconds);
  void replay(int thread);
  void trace_batch(int thread, int64_t begin);
  void give_up(const char* reason);
  StepCommunicator& everyone() const { return job_ ? *job_ : *ranks; }
  size_t turn() const { return runs_ % in_flight_.size(); }

  static constexpr int64_t kReportInts = 1;  // of a message that asks for stats; a batch is longer

  Communicator& stage_;
  std::unique_ptr<StepCommunicator> job_;  // of all ranks; null where these are the stage's
  std::vector<BatchView> in_flight_;       // by turns: published, and not run yet
  uint32_t published_ = 0;
  std::vector<Channel::Pending> outgoing_;  // by turns: rows on their way to the next stage, which need progress
  std::vector<ckdist_execution_plan> plans_;
  std::vector<StepList> lists_;
  Repacker* const repacker_;
  int64_t plan_bytes_[kMaxPlans];  // of the matrices that a step reads
  int token_steps_[kMaxPlans];     // steps before those of selected rows alone
  bool needs_firsts_[kMaxPlans];   // it attends to what an encoder has read
  int most_steps_ = 0;             // of a plan
  uint32_t runs_ = 0;              // batches so far
  std::unique_ptr<Counter[]> step_counters_;
  int64_t kv_bytes_ = 0;
  std::optional<Arena> arena_, kv_arena_, worker_arena_;
  std::vector<Worker> workers_;
  std::vector<float> hidden_;                         // (max_outputs, hidden)
  std::vector<const float*> peers_[kSlots];           // the slots of the ranks that share memory
  std::unique_ptr<std::atomic<int64_t>[]> counters_;  // (threads, most_steps): next item of each step that shares work
                                                      // out dynamically, of all or of a thread's
  int64_t sent_before_ = 0;                           // bytes to other hosts, when counts were reset
  Traffic traffic_;                                   // of plan 0, which decodes
  int64_t experts_read_ = 0;                          // bytes, in this batch
  int64_t prefilled_ = 0;  // when the batch before ended, where that was a token-parallel prefill
};

}  // namespace ckdist
