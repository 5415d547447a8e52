// Replays lowered programs over one cache: every thread of the rank walks the same flat list of steps and meets the
// others at barriers.
//
// Nothing is allocated, looked up by name or asked of Python between the first and the last step. The number of tokens
// is data: buffers are sized once for the largest batch, and small batches take a path with fewer barriers (see
// Prepare).
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/export.h"

#include "api/runtime.h"
#include "comm/communicator.h"
#include "core/arena.h"
#include "core/trace.h"
#include "kernels/kernels.h"
#include "runtime/batch.h"
#include "runtime/pool.h"
#include "runtime/reorganizer.h"

namespace ckdist {

class Executable {
 public:
  // `reorganizer`: of matrices that are not all packed yet; null where all are.
  Executable(const ckdist_program& program, Communicator& communicator, Reorganizer* reorganizer, int threads,
             std::vector<int> cpus, int spins);

  void run(const int32_t* message, int64_t ints);
  void work();
  void stop();
  const float* logits() { return ranks_->gathered(); }
  const uint8_t* kv_data() const { return kv_arena_->data(); }
  int64_t kv_bytes() const { return kv_bytes_; }
  ckdist_times times(bool reset);
  // From now on every thread writes what it does to a lane of its own. Not while a batch runs; the trace outlives the
  // executable.
  void trace(Trace& trace);

 private:
  // Batches of at most this many rows are prepared by every thread for itself, which saves a barrier; larger ones once
  // for all.
  static constexpr int kReplicatedRows = 2;
  static constexpr int kQueryTile = 32;       // query tokens of one attention task
  static constexpr int64_t kTokensAhead = 2;  // whose heads are fetched while one's are rotated
  static constexpr int64_t kLowTokens = 16,
                           kLowTiles = 8;  // that one item of a low_rank step computes at a time, and has in all
  static constexpr int kFewRows = 16;      // products of at most so many are bound by memory
  // From so many rows a thread on, products are cut by rows and not by weights: what a thread wrote it reads again,
  // from its own caches.
  static constexpr int64_t kOwnRows = 64;
  static constexpr int64_t kPieceBytes = 384 << 10,
                           kLeastPieces =
                               8;  // of a product's weights that a thread takes at a time: what its L2 cache holds
  static constexpr int64_t kGatedRows = 64;          // that a gate joins at a time, while the L2 cache has both
  static constexpr int64_t kAheadBytes = 256 << 10;  // of a product's weights that are fetched before it begins

  // Of what a step without prompts reads it packs at most one part in so many for good; a step with prompts packs all
  // that it meets.
  static constexpr int64_t kKeptShare = 16;

  static constexpr int kMaxPhases = 8;
  // A product that is added to another is made of so many tokens and tiles at a time: it stays in the L2 cache.
  static constexpr int64_t kAddedTokens = 256, kAddedTiles = 8;

  struct Ahead {
    int step;
    const uint8_t *at, *end;
  };  // of the product whose weights are being fetched, what is still to come

  struct alignas(64) Worker {      // one thread's private memory
    uint8_t* scratch;              // attention
    float* row;                    // one residual row, or a rotated key
    float* product;                // (kAddedTokens, kAddedTiles * kTileRows)
    float* sums;                   // (kLowTokens, kLowTiles * kTileRows): what a low rank adds
    uint8_t* activations[3];       // kReplicatedRows rows per format
    uint8_t* tiles;                // of a slice that was not packed yet
    std::unique_ptr<Mover> mover;  // of those that are kept; null where all are packed
    Ahead ahead;
    int64_t moved = 0;          // bytes read of other ranks' memory in this batch
    TraceLane* lane = nullptr;  // where it is traced
  };
  struct Range {
    int64_t begin, end;
  };
  struct Item {
    int run, first, tokens, kv_head;
  };  // an attention task: query tokens [first, first + tokens) of a run
  struct Layer {  // what the rank has of one layer's attention and cache
    CacheShape cache;
    int kv_heads;
    const int32_t* heads_per_kv;
    std::vector<int> first_head;  // of each local kv-head
    int64_t head_bytes, block_bytes;
    uint8_t* blocks;  // of kv-head 0

    uint8_t* kv(int kv_head) const { return blocks + kv_head * head_bytes; }
    int64_t heads() const { return kv_heads ? first_head[kv_heads - 1] + heads_per_kv[kv_heads - 1] : 0; }
  };
  // One sequence's decode attention cut along its context: each (run, kv-head) has its parts, and who finishes the last
  // merges them.
  struct Split {
    int64_t spans_each = 0;  // spans of one task; 0: nothing is cut
    int64_t spans = 0;       // of all runs together
  };

  void replay(int thread);
  void trace_batch(int thread, int64_t begin);
  void execute(int thread, int step);
  void embed(int thread, int index);
  void prepare(int thread, int index);
  void share_outputs(int thread, int index);
  const float* residual_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row);
  void prepare_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row, bool store);
  void linear(int thread, int index);
  void multiply(int thread, const ckdist_step& step, int m, int s, int64_t column, Range tiles, Range rows);
  void multiply_gated(int thread, const ckdist_step& step, int s, int64_t column, Range tiles, Range rows);
  void multiply_added(int thread, const ckdist_step& step, Range tiles, Range rows);
  template <class Product>
  void each_packed(int thread, const Weight& weight, int64_t begin, int64_t end, Product&& product);
  void low_rank(int thread, int index);
  void squares(int thread, int index);
  void rotate(const ckdist_step& step, const float* x, int64_t position, int64_t width, float* out) const;
  void inverse_norms(int thread, const ckdist_step& step, int64_t token, float* queries, float* keys);
  void attend(int thread, int index);
  void attend_prompt(int thread, int index);
  void attend_split(int thread, int index, const Split& split);
  void rotate_and_store(int thread, const ckdist_step& step, int run, int64_t token, int kv_head);
  void fetch_token(const ckdist_step& step, int64_t token, int kv_head);
  AttentionTask task_of(const ckdist_step& step, const Item& item);
  Split split_of(const ckdist_step& step);
  // Of the batch's tokens the first that is a local rank's own, where they are cut; and whose a token is.
  int64_t share(int rank) const { return (batch_.tokens * rank + ranks_->local_size - 1) / ranks_->local_size; }
  int owner(int64_t token) const { return int(token * ranks_->local_size / batch_.tokens); }

  int64_t rows(const ckdist_step& step) const {
    return !step.outputs_only ? own_tokens_ : step.own ? own_outputs_ : batch_.outputs;
  }
  // Of n rows those of a thread: where there are many, in the units of products.
  int64_t row_begin(int thread, int64_t n) const {
    return thread == active_ || n < kOwnRows * active_ ? n * thread / active_ : n * thread / active_ / 16 * 16;
  }
  Range rows_of(int thread, int64_t n) const { return {row_begin(thread, n), row_begin(thread + 1, n)}; }
  // Calls work(item) for items that are cut evenly over the threads; who is done takes of what others have left.
  template <class Work>
  void share_out(int thread, int index, int64_t items, Work&& work) {
    for (int o = 0; o < active_; o++) {
      const int owner = (thread + o) % active_;
      const int64_t begin = items * owner / active_, end = items * (owner + 1) / active_;
      for (int64_t i; (i = begin + counters_[owner * most_steps_ + index].fetch_add(1)) < end;) work(i);
    }
  }
  // The row among own tokens, or all, of row r of a step of outputs.
  int64_t token_row(const ckdist_step& step, int64_t r) const {
    return step.own ? batch_.output_tokens[own_output_ + r] - own_ : batch_.output_tokens[r];
  }
  bool replicated(const ckdist_step& step) const {
    return rows(step) <= kReplicatedRows &&
           (step.outputs_only ? !step.own : !phase_->tokens_cut);  // own rows are cut for several shards
  }
  const ckdist_value& value(int index) const { return phase_->values[index]; }
  float* floats(int value, int64_t* stride);               // row 0 of a float value, and the floats from row to row
  const float* peer_row(int index, int64_t token) const {  // of a value in the slot of the token's rank
    const ckdist_value& v = value(index);
    const int rank = owner(token);
    return peers_[v.place][rank] + (token - share(rank)) * v.width + v.lead;
  }
  const uint8_t* activations(int thread, const ckdist_step& step, int index) const;
  int64_t activation_stride(const ckdist_value& v) const {
    return ActivationRow::bytes(ActivationFormat(v.format), v.width);
  }
  const Weight& weight(int index) const { return *static_cast<const Weight*>(phase_->matrices[index]); }
  const Matrix& matrix(int index) const { return weight(index).matrix; }
  const float* vector(int index) const { return phase_->vectors[index]; }
  const Layer& layer_of(const ckdist_step& step) const { return layers_[step.i[0]]; }
  int64_t weight_bytes(const ckdist_step& step) const;
  template <class Visit>
  void each_range(const ckdist_step& step, int64_t from, int64_t to, Visit&& visit);
  void find_ahead(int thread, int index);
  static void fetch_ahead(void* ahead);
  void gather(int64_t rows, int step);
  void give_up(const char* reason);
  void meet(int thread, int index);
  template <class Last>
  void meet(int thread, int index, bool exchange, Last&& last) {
    TraceLane* const lane = workers_[thread].lane;
    const bool timed = thread == 0 || lane != nullptr;
    const int64_t start = timed ? now_ns() : 0;
    find_ahead(thread, index);
    const Idle idle = {fetch_ahead, &workers_[thread].ahead};
    pool_.barrier([&] { last(idle); }, idle);
    if (!timed) return;
    const int64_t end = now_ns();
    if (thread == 0) (exchange ? times_.exchange : times_.barrier) += double(end - start) * 1e-9;
    if (lane != nullptr)
      lane->add(exchange ? ckdist_trace_exchange : ckdist_trace_barrier, start, end, index, batch_.phase);
  }
  void finish(int thread, int index, int64_t rows);  // the end of a step that wrote its last output

  const ckdist_program program_;
  std::vector<ckdist_phase> phases_;
  const ckdist_phase* phase_ = nullptr;  // of the batch
  Communicator& communicator_;
  std::unique_ptr<StepCommunicator> ranks_;
  const Kernels& kernels_;
  Reorganizer* const reorganizer_;
  int64_t phase_bytes_[kMaxPhases];  // of the matrices that a step reads
  bool reorganizing_ = false;        // the batch reads matrices that are not all packed
  std::optional<Arena> arena_, kv_arena_, scratch_arena_, part_arena_;
  std::vector<Worker> workers_;
  std::vector<int> next_linear_[kMaxPhases];  // the product after each step, or -1
  int token_steps_[kMaxPhases];               // steps before those of outputs alone
  std::vector<const float*> peers_[kSlots];   // the slots of the ranks that share memory
  std::vector<Layer> layers_;
  int most_steps_ = 0;                                // of a phase
  std::unique_ptr<std::atomic<int64_t>[]> counters_;  // (threads, most_steps): next item of each step that shares work
                                                      // out dynamically, of all or of a thread's
  std::unique_ptr<std::atomic<int64_t>[]> merged_;    // (sequences, most kv_heads): spans whose parts are there
  int64_t part_bytes_, part_count_;
  int64_t kv_bytes_ = 0;
  BatchView batch_;
  int64_t own_ = 0, own_tokens_ = 0;          // the batch's tokens that are this rank's: the first, and how many
  int64_t own_output_ = 0, own_outputs_ = 0;  // the outputs among them
  int active_ = 1;
  ckdist_times times_{};
  int64_t prefilled_ = 0;  // when the batch before ended, where that was a prefill by tokens
  Pool pool_;              // last: its threads use all of the above
};

}  // namespace ckdist
