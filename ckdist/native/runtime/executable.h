// Replays a lowered program: every thread of the rank walks the same flat list of steps and meets the others at barriers.
//
// Nothing is allocated, looked up by name or asked of Python between the first and the last step. The number of tokens is
// data: buffers are sized once for the largest batch, and small batches take a path with fewer barriers (see Prepare).
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/export.h"

#include "api/runtime.h"
#include "comm/group.h"
#include "core/arena.h"
#include "kernels/kernels.h"
#include "runtime/batch.h"
#include "runtime/pool.h"

namespace ckdist {

class Executable {
 public:
  Executable(const ckdist_program& program, Group& group, int threads, std::vector<int> cpus, int spins);

  void run(const int32_t* message, int64_t ints);
  void work();
  void stop();
  const float* logits() { return group_.gathered(); }
  const uint8_t* kv_data() const { return kv_arena_->data(); }
  int64_t kv_bytes() const { return kv_bytes_; }
  ckdist_times times(bool reset);

 private:
  // Batches of at most this many rows are prepared by every thread for itself, which saves a barrier; larger ones once for all.
  static constexpr int kReplicatedRows = 2;
  static constexpr int kQueryTile = 32;  // query tokens of one attention task
  static constexpr int64_t kLowTokens = 16, kLowTiles = 8;  // that one item of a low_rank step computes at a time, and has in all
  static constexpr int kFewRows = 16;  // products of at most so many are bound by memory
  static constexpr int64_t kAheadBytes = 256 << 10;  // of a product's weights that are fetched before it begins

  struct Ahead { int step; const uint8_t *at, *end; };  // of the product whose weights are being fetched, what is still to come

  struct Worker {  // one thread's private memory
    uint8_t* scratch;          // attention
    float* row;                // one residual row
    float* sums;               // (kLowTokens, kLowTiles tiles' rows): what a low rank adds
    uint8_t* activations[3];   // kReplicatedRows rows per format
    Ahead ahead;
  };
  struct Item { int run, first, tokens, kv_head; };  // an attention task: query tokens [first, first + tokens) of a run
  // One sequence's decode attention cut along its context: each (run, kv-head) has its parts, and who finishes the last merges them.
  struct Split {
    int64_t spans_each = 0;  // spans of one task; 0: nothing is cut
    int64_t spans = 0;       // of all runs together
  };

  void replay(int thread);
  void execute(int thread, int step);
  void embed(int thread, int index);
  void prepare(int thread, int index);
  void prepare_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row, bool store);
  void linear(int thread, int index);
  void low_rank(int thread, int index);
  void attend(int thread, int index);
  void attend_prompt(int thread, int index);
  void attend_split(int thread, int index, const Split& split);
  void rotate_and_store(const ckdist_step& step, int run, int64_t token, int kv_head);
  AttentionTask task_of(const ckdist_step& step, const Item& item);
  Split split_of(const ckdist_step& step);

  int64_t rows(const ckdist_step& step) const { return step.outputs_only ? batch_.outputs : batch_.tokens; }
  bool replicated(const ckdist_step& step) const { return rows(step) <= kReplicatedRows; }
  float* floats(int value, int64_t* stride);  // row 0 of a float value, and the floats from row to row
  int64_t activation_stride(const ckdist_value& v) const { return ActivationRow::bytes(ActivationFormat(v.format), v.width); }
  const Matrix& matrix(int index) const { return *static_cast<const Matrix*>(program_.matrices[index]); }
  uint8_t* kv(int layer, int kv_head) const;
  int64_t weight_bytes(const ckdist_step& step) const;
  template <class Visit> void each_range(const ckdist_step& step, int64_t from, int64_t to, Visit&& visit);
  void find_ahead(int thread, int index);
  static void fetch_ahead(void* ahead);
  void finish(int thread, int index);  // meets, and exchanges out[0] where it is partial
  void meet(int thread, int index);
  template <class Last> void meet(int thread, int index, bool exchange, Last&& last);

  const ckdist_program program_;
  std::vector<ckdist_step> steps_;
  std::vector<ckdist_value> values_;
  Group& group_;
  const Kernels& kernels_;
  std::optional<Arena> arena_, kv_arena_, scratch_arena_, part_arena_;
  std::vector<Worker> workers_;
  std::vector<int> next_linear_;                // the product after each step, or -1
  std::vector<int> first_head_;                 // of each local kv-head
  std::unique_ptr<std::atomic<int64_t>[]> counters_;  // next item of each step that shares work out dynamically
  std::unique_ptr<std::atomic<int64_t>[]> merged_;    // (sequences, kv_heads): spans whose parts are there
  int64_t part_bytes_, part_count_;
  int64_t kv_head_bytes_, kv_block_bytes_, kv_bytes_;
  int max_group_ = 1;
  BatchView batch_;
  int active_ = 1;
  ckdist_times times_{};
  Pool pool_;  // last: its threads use all of the above
};

}  // namespace ckdist
