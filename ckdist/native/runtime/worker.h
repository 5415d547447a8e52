// Executes the commands of rank 0 in their order, on every rank: steps of several models, copies of blocks, reports.
//
// A rank has one worker. It owns the job's channel of commands and the table of models; each model has its cache, its
// buffers and the communicator of its steps, and all use one pool of threads. Rank 0 alone decides: it publishes a
// command, then executes its own part of it.
//
// Threads: one thread of a rank calls the worker. It is also the pool's first thread, and it is the only one that calls
// the channel and the models' step communicators. The pool's other threads run steps alone. Blocks are copied by the
// thread of BlockCopier. A model is loaded by a thread of the caller, which uses neither the channel nor the pool.
#pragma once
#include "comm/communicator.h"
#include "runtime/batch.h"
#include "runtime/block_copier.h"
#include "runtime/inference.h"

namespace ckdist {

class Worker {
 public:
  explicit Worker(Communicator& job);
  ~Worker();

  // The channel takes batches of the largest model. A collective call while no step is in flight.
  void add(int32_t id, Inference& model);
  // Rank 0. Throws before anything is sent if the ranks could not execute the command.
  void publish(const int32_t* message, int64_t ints);
  void run();
  void report(int32_t id, ckdist_step_stats* out);
  void copy_results(ckdist_copy_results* out);
  // Other ranks. Returns a command that the caller must execute; other commands are executed here.
  ckdist_command work();
  void trace(Trace& trace) { copier_->trace(trace); }

 private:
  struct Step {
    Inference* model;
    BatchView batch;
    uint32_t copies;
  };

  Inference& model(int32_t id) const;
  void execute(const Step& step);
  BlockCopier::Copy copy_of(const ckdist_command& command, const int32_t* message, int64_t ints) const;
  static void place_states(const BlockCopier::Copy& copy);
  // Publishes a command without data and receives each other rank's answer.
  template <class Answer>
  void ask(ckdist_command_kind kind, int32_t id, Answer* out);
  void remove(int32_t id);
  void check_idle(const char* purpose) const;
  void check_copies(const ckdist_command& command) const;
  template <class Body>
  void guarded(Body&& body);

  Communicator& job_;
  StepSizes sizes_{};                          // of the channel
  std::unique_ptr<StepCommunicator> channel_;  // from the first model on
  std::map<int32_t, Inference*> models_;
  const std::function<bool()> progress_;  // continues the models' messages to other stages
  // Rank 0: ring of published steps that have not run. Copies that are published between them begin in their order.
  std::vector<Step> steps_;
  uint32_t published_ = 0, runs_ = 0, copies_ = 0;
  struct Waiting {
    uint32_t step;  // the copy begins before this step
    BlockCopier::Copy copy;
  };
  std::deque<Waiting> waiting_;
  std::unique_ptr<BlockCopier> copier_;  // last: its thread uses the models
};

}  // namespace ckdist
