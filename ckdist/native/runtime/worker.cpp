#include "runtime/worker.h"

namespace ckdist {

namespace {

constexpr int64_t kCommandInts = sizeof(ckdist_command) / sizeof(int32_t);

// The header of a message. Data of a kind is checked by the functions that read it.
const ckdist_command& parse(const int32_t* message, int64_t ints) {
  if (ints < kCommandInts) fail(Status::native, "a command of %lld ints has no header", (long long)ints);
  const ckdist_command& command = *reinterpret_cast<const ckdist_command*>(message);
  if (command.kind < 0 || command.kind >= ckdist_command_kinds)
    fail(Status::native, "a command has unknown kind %d", command.kind);
  const bool has_data = command.kind == ckdist_command_run || command.kind == ckdist_command_copy_blocks;
  if (!has_data && ints != kCommandInts)
    fail(Status::native, "a command of kind %d has %lld ints, not %lld", command.kind, (long long)ints,
         (long long)kCommandInts);
  return command;
}

}  // namespace

Worker::Worker(Communicator& job)
    : job_(job), progress_([this] {
        bool under_way = false;
        for (const auto& [id, model] : models_) under_way |= model->test_outgoing();
        return under_way;
      }),
      copier_(std::make_unique<BlockCopier>(job.timeout_ns())) {}

Worker::~Worker() {
  if (copier_->is_stuck()) copier_.release();  // a join could take forever, and the job has failed
}

Inference& Worker::model(int32_t id) const {
  const auto at = models_.find(id);
  if (at == models_.end()) fail(Status::native, "model %d is not loaded; %zu others are", id, models_.size());
  return *at->second;
}

void Worker::check_idle(const char* purpose) const {
  if (published_ != runs_) fail(Status::native, "%u steps are in flight while %s", published_ - runs_, purpose);
}

void Worker::check_copies(const ckdist_command& command) const {
  if (int32_t(copies_ - uint32_t(command.copies)) < 0)
    fail(Status::native, "a command waits for copy %d of %u", command.copies, copies_);
}

// A failure of this rank ends the job.
template <class Body>
void Worker::guarded(Body&& body) {
  try {
    body();
  } catch (const std::exception& e) {
    job_.abandon(e.what());
    for (const auto& [id, model] : models_) model->give_up(e.what());
    throw;
  }
}

void Worker::add(int32_t id, Inference& model) {
  check_idle("a model is added");
  if (models_.count(id)) fail(Status::native, "model %d is loaded already", id);
  const StepSizes before = sizes_;
  sizes_.batch_ints = std::max(sizes_.batch_ints, model.message_ints());
  sizes_.batches = std::max<int64_t>(sizes_.batches, model.in_flight());
  if (!channel_ || sizes_.batch_ints > before.batch_ints || sizes_.batches > before.batches)
    channel_ = job_.steps(sizes_);
  steps_.resize(size_t(sizes_.batches));
  models_.emplace(id, &model);
}

void Worker::remove(int32_t id) {
  copier_->wait(copies_);
  const auto at = models_.find(id);
  if (at == models_.end()) return;  // it was not loaded
  at->second->finish_outgoing();
  models_.erase(at);
}

BlockCopier::Copy Worker::copy_of(const ckdist_command& command, const int32_t* message, int64_t ints) const {
  constexpr int64_t kHeader = sizeof(ckdist_copy_blocks) / sizeof(int32_t);
  const auto& copy = *reinterpret_cast<const ckdist_copy_blocks*>(message);
  constexpr int64_t kEach = sizeof(ckdist_block_copy) / sizeof(int32_t);
  if (ints < kHeader || copy.count < 0 || copy.count > ckdist_copies_most || ints != kHeader + kEach * copy.count)
    fail(Status::native, "a copy of blocks has %lld ints, which do not fit its blocks, or more than %d blocks",
         (long long)ints, ckdist_copies_most);
  Inference& those = model(command.model);
  const auto* const blocks = reinterpret_cast<const ckdist_block_copy*>(message + kHeader);
  for (const ckdist_block_copy* block = blocks; block != blocks + copy.count; block++) those.check_copy(*block);
  return {&those, copy.into_cache != 0, {blocks, blocks + copy.count}};
}

// Steps that are accepted from now on may continue from the states that a copy brings.
void Worker::place_states(const BlockCopier::Copy& copy) {
  for (const ckdist_block_copy& block : copy.blocks)
    if (copy.into_cache && block.entry.kind == ckdist_slab_states)
      copy.model->states.load(block.place, (block.entry.depth + 1) * ckdist_block_tokens);
}

void Worker::publish(const int32_t* message, int64_t ints) {
  const ckdist_command& command = parse(message, ints);
  check_copies(command);
  Step step{nullptr, {}, uint32_t(command.copies)};
  BlockCopier::Copy copy{};
  int64_t begin = 0;
  if (command.kind == ckdist_command_run) {
    if (published_ - runs_ >= steps_.size())
      fail(Status::native, "%zu batches are in flight, which is the maximum", steps_.size());
    step.model = &model(command.model);
    step.batch = step.model->accept(message, ints);
    steps_[published_++ % steps_.size()] = step;
    if (step.model->lane(0)) begin = now_ns();
  } else if (command.kind == ckdist_command_copy_blocks) {
    copy = copy_of(command, message, ints);
  } else if (command.kind != ckdist_command_stop) {  // a step may have failed before the stop
    check_idle("a command other than a step is published");
  }
  const bool last = command.kind == ckdist_command_stop || command.kind == ckdist_command_add;
  if (job_.size > 1) channel_->publish(message, ints, last);
  if (begin != 0 && job_.size > 1) step.model->trace_publish(step.batch, begin);
  if (command.kind == ckdist_command_copy_blocks) {
    copies_++;
    place_states(copy);
    if (published_ == runs_) copier_->begin(std::move(copy));
    else waiting_.push_back({published_, std::move(copy)});
  }
  if (command.kind == ckdist_command_unload) remove(command.model);
}

void Worker::execute(const Step& step) {
  copier_->wait(step.copies);
  step.model->run(step.batch);
}

void Worker::run() {
  if (published_ == runs_) fail(Status::native, "every published batch has run");
  guarded([&] { execute(steps_[runs_ % steps_.size()]); });
  runs_++;
  for (; !waiting_.empty() && waiting_.front().step == runs_; waiting_.pop_front())
    copier_->begin(std::move(waiting_.front().copy));
}

template <class Answer>
void Worker::ask(ckdist_command_kind kind, int32_t id, Answer* out) {
  const ckdist_command command{kind, id, 0};
  publish(reinterpret_cast<const int32_t*>(&command), kCommandInts);
  guarded([&] {
    for (int rank = 1; rank < job_.size; rank++) channel_->recv(rank, &out[rank], sizeof out[rank], 0);
  });
}

void Worker::report(int32_t id, ckdist_step_stats* out) {
  out[0] = model(id).stats(false);
  ask(ckdist_command_report, id, out);
}

void Worker::copy_results(ckdist_copy_results* out) {
  out[0] = copier_->results();
  ask(ckdist_command_copy_results, 0, out);
}

ckdist_command Worker::work() {
  ckdist_command returned{};
  guarded([&] {
    for (;;) {
      int64_t ints = 0;
      const int32_t* const message = channel_->receive(&ints, progress_);
      const ckdist_command& command = parse(message, ints);
      check_copies(command);
      if (command.kind == ckdist_command_run) {
        Inference& those = model(command.model);
        execute({&those, those.accept(message, ints), uint32_t(command.copies)});
      } else if (command.kind == ckdist_command_copy_blocks) {
        copies_++;
        BlockCopier::Copy copy = copy_of(command, message, ints);
        place_states(copy);
        copier_->begin(std::move(copy));
      } else if (command.kind == ckdist_command_report) {
        const ckdist_step_stats own = model(command.model).stats(false);
        channel_->send(0, &own, sizeof own, 0);
      } else if (command.kind == ckdist_command_copy_results) {
        const ckdist_copy_results own = copier_->results();
        channel_->send(0, &own, sizeof own, 0);
      } else {
        if (command.kind == ckdist_command_unload) remove(command.model);
        returned = command;
        return;
      }
    }
  });
  return returned;
}

}  // namespace ckdist
