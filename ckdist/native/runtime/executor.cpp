#include "runtime/executor.h"

#include <utility>

#include "core/error.h"

namespace ckdist {

namespace {
std::array<StepKind, ckdist_step_kinds>& kinds() {
  static std::array<StepKind, ckdist_step_kinds> table{};
  return table;
}
}  // namespace

void add_step_kind(int32_t kind, const StepKind& that) { kinds()[kind] = that; }

const StepKind& step_kind(int32_t kind) {
  if (kind < 0 || kind >= ckdist_step_kinds || kinds()[kind].run == nullptr)
    fail(Status::native, "a step has unknown kind %d", kind);
  return kinds()[kind];
}

Executor::StepList::StepList(const ckdist_step_list& list, int number)
    : steps(list.steps, list.steps + list.count), next_ahead(list.count), number(number) {
  for (const ckdist_step* step : steps) kinds.push_back(&step_kind(step->kind));
  for (int i = list.count - 1, next = -1; i >= 0; --i) {
    next_ahead[i] = next;
    if (kinds[i]->ahead != nullptr) next = i;
  }
}

Executor::Executor(const ckdist_program& that, std::shared_ptr<Pool> pool)
    : program(that), plan(that.plans), pool_(std::move(pool)), threads_(pool_->size()) {
  int64_t bytes = 64;
  for (int p = 0; p < program.plan_count; p++) bytes = std::max(bytes, program.plans[p].arena_bytes);
  arena_.emplace(bytes, "activations");
}

void Executor::make_lists() {
  for (int p = 0; p < program.plan_count; p++) {
    plan = &program.plans[p];  // so that kinds can read their values
    for (int l = 0; l < plan->list_count; l++) {
      const StepList& list = lists_.emplace_back(plan->lists[l], int(lists_.size()));
      for (size_t i = 0; i < list.steps.size(); ++i) {
        memory_bytes_ = std::max(memory_bytes_, list.kinds[i]->thread_bytes(*this, *list.steps[i]));
        workspace_bytes_ = std::max(workspace_bytes_, list.kinds[i]->workspace_bytes(*this, *list.steps[i]));
      }
    }
  }
  memory_bytes_ = (memory_bytes_ + 4095) / 4096 * 4096 + 64;  // not a multiple of a page: threads share no cache sets
  memory_.emplace(memory_bytes_ * threads(), "the threads' buffers");
  workspace_.emplace(std::max<int64_t>(workspace_bytes_, 64), "the steps' workspace");
}

void Executor::trace(Trace& trace) {
  for (size_t t = 0; t < threads_.size(); t++) threads_[t].lane = trace.lane("thread " + std::to_string(t));
}

void Executor::walk(int thread, int count, bool by_kind) {
  TraceLane* const lane = threads_[thread].lane;
  const bool timed = lane != nullptr || (by_kind && thread == 0);
  int64_t at = timed ? now_ns() : 0;
  for (int i = 0; i < count; i++) {
    list_->kinds[i]->run(*this, thread, i, *list_->steps[i]);
    if (!timed) continue;
    const int64_t end = now_ns();
    if (lane) lane->add(ckdist_trace_step, at, end, i, list_->number);
    if (thread == 0) seconds_[list_->steps[i]->kind] += double(end - at) * 1e-9;
    at = end;
  }
}

void Executor::fetch_ahead(void* with) {
  Ahead& ahead = *static_cast<Ahead*>(with);
  for (int line = 0; line < 4 && ahead.at < ahead.end; line++, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
  cpu_pause();
}

}  // namespace ckdist
