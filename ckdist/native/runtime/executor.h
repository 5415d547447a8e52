// Runs a list of steps on one rank's threads: dispatches, synchronizes, times and traces the steps.
//
// `Inference` and `Training` hold the other data that steps work on. A run of the list allocates no memory.
#pragma once
#include <array>
#include <optional>

#include "api/executable_api.h"
#include "api/program_api.h"
#include "api/steps_training_api.h"
#include "core/arena.h"
#include "core/team.h"
#include "core/trace.h"
#include "runtime/pool.h"

namespace ckdist {

class Executor;

// The start of the weights that a thread reads next. A waiting thread fetches them to its caches.
struct Ahead {
  int step = -1;
  const uint8_t *at = nullptr, *end = nullptr;
};

// The fields of a step of one kind; null for a step of another.
template <class Fields>
const Fields* fields_of(const ckdist_step* step, int32_t kind) {
  return step->kind == kind ? reinterpret_cast<const Fields*>(step) : nullptr;
}

// A kind of step. Each file of runtime/steps registers its own (see `RegisteredKind`).
struct StepKind {
  void (*run)(Executor& executor, int thread, int index, const ckdist_step& step);
  // Bytes of each thread's own memory, and of the workspace that all threads share.
  int64_t (*thread_bytes)(const Executor& executor, const ckdist_step& step);
  int64_t (*workspace_bytes)(const Executor& executor, const ckdist_step& step);
  // Finds the first weights that a thread reads. Null if the kind reads none ahead.
  void (*ahead)(Executor& executor, int thread, const ckdist_step& step, Ahead& ahead);
};
// Throws for a kind that no file has registered.
const StepKind& step_kind(int32_t kind);
void add_step_kind(int32_t kind, const StepKind& that);

// Allocates consecutive memory from `base` on. If `base` is null, only counts the bytes.
struct Carver {
  uint8_t* base = nullptr;
  int64_t used = 0;
  uint8_t* bytes(int64_t n) {
    uint8_t* const at = base ? base + used : nullptr;
    used += (n + 63) / 64 * 64;
    return at;
  }
  template <class T>
  T* array(int64_t n) {
    return reinterpret_cast<T*>(bytes(n * int64_t{sizeof(T)}));
  }
  float* floats(int64_t n) { return array<float>(n); }
};

// Bytes that carve(carver) takes.
template <class Carve>
int64_t carved_bytes(Carve&& carve) {
  Carver c;
  carve(c);
  return c.used;
}

// One thread's run of one step: the base of every kind of step. A derived class has `void run()` and may hide the
// members below. With kReadsAhead it also has `static void ahead(Owner&, int thread, const Fields&, Ahead&)`.
template <class OwnerType, class FieldsType>
struct StepRun {
  using Owner = OwnerType;
  using Fields = FieldsType;
  Owner& r;
  const int thread, index;
  const Fields& step;

  static int64_t thread_bytes(const Owner&, const Fields&) { return 0; }
  static int64_t workspace_bytes(const Owner&, const Fields&) { return 0; }
  static constexpr bool kReadsAhead = false;

  float* buffer() const { return reinterpret_cast<float*>(r.memory(thread)); }  // the thread's own memory
};

// A step whose threads carve buffers from their memory. `Run` derives from Carved<Run, its other base> and has
// `static … room(Carver&, const Owner&, const Fields&)`.
template <class Run, class Base>
struct Carved : Base {
  static int64_t thread_bytes(const typename Base::Owner& r, const typename Base::Fields& step) {
    return carved_bytes([&](Carver& c) { Run::room(c, r, step); });
  }
  auto buffers() const {
    Carver c{this->r.memory(this->thread)};
    return Run::room(c, this->r, this->step);
  }
};

// Registers `Run` for steps of a kind.
template <class Run>
struct RegisteredKind {
  using Owner = typename Run::Owner;
  using Fields = typename Run::Fields;
  static const Fields& fields(const ckdist_step& step) { return reinterpret_cast<const Fields&>(step); }

  explicit RegisteredKind(int32_t kind) {
    StepKind that{[](Executor& e, int thread, int index, const ckdist_step& s) {
                    Run{{static_cast<Owner&>(e), thread, index, fields(s)}}.run();
                  },
                  [](const Executor& e, const ckdist_step& s) {
                    return Run::thread_bytes(static_cast<const Owner&>(e), fields(s));
                  },
                  [](const Executor& e, const ckdist_step& s) {
                    return Run::workspace_bytes(static_cast<const Owner&>(e), fields(s));
                  },
                  nullptr};
    if constexpr (Run::kReadsAhead)
      that.ahead = [](Executor& e, int thread, const ckdist_step& s, Ahead& ahead) {
        Run::ahead(static_cast<Owner&>(e), thread, fields(s), ahead);
      };
    add_step_kind(kind, that);
  }
};

class Executor {
 public:
  // Allocates the arena of the largest plan.
  Executor(const ckdist_program& program, std::shared_ptr<Pool> pool);

  const ckdist_program program;
  const ckdist_execution_plan* plan;  // the plan that runs
  const ckdist_value& value(int index) const { return plan->values[index]; }

  int threads() const { return pool_->size(); }
  int active() const { return active_; }  // threads that run the current list
  // Memory of one thread, and the workspace of all threads. Each step carves them for itself; data of other steps is
  // lost.
  uint8_t* memory(int thread) const { return memory_->data() + thread * memory_bytes_; }
  uint8_t* workspace() const { return workspace_->data(); }
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Makes every thread record its steps in a lane of its own. Not while steps run. The trace must outlive this object.
  void trace(Trace& trace);
  TraceLane* lane(int thread) const { return threads_[thread].lane; }

  // Barrier over the active threads. The last to arrive runs `last(idle)` before the others continue. `exchange`:
  // `last` communicates with other ranks, so the time counts as communication.
  template <class Last>
  void meet(int thread, int index, bool exchange, Last&& last) {
    Thread& own = threads_[thread];
    const bool timed = thread == 0 || own.lane != nullptr;
    const int64_t start = timed ? now_ns() : 0;
    find_ahead(thread, index);
    const Idle idle = {fetch_ahead, &own.ahead};
    pool_->barrier(thread, [&] { last(idle); }, idle);
    if (!timed) return;
    const int64_t end = now_ns();
    if (thread == 0) (exchange ? stats_.exchange : stats_.barrier) += double(end - start) * 1e-9;
    if (own.lane != nullptr)
      own.lane->add(exchange ? ckdist_trace_exchange : ckdist_trace_barrier, start, end, index, list_->number);
  }
  void meet(int thread, int index) {
    meet(thread, index, false, [](Idle) {});
  }

  // Returns when done() holds. Another active thread must make it true.
  template <class Done>
  void wait_until(Done&& done) const {
    pool_->wait_until(done);
  }

  // Runs body(item) for every item. Items are divided evenly over the threads, so that a thread has consecutive items,
  // and the same rows in most steps, in its caches. A thread that has finished takes items that others have left. Ends
  // with a barrier.
  template <class Body>
  void parallel_for(int thread, int index, int64_t items, Body&& body) {
    take_shares(
        thread, active_, [&](int owner) { return items * owner / active_; },
        [&](int owner) -> std::atomic<int64_t>& { return threads_[owner].taken; }, body);
    meet(thread, index, false, [this](Idle) {
      for (int owner = 0; owner < active_; owner++) threads_[owner].taken.store(0, std::memory_order_relaxed);
    });
  }

 protected:
  // Runs body(item) for the items of a share, and then for those of other shares that nobody has taken. The items of
  // share s begin at begin(s); taken(s) counts those that are begun.
  template <class Begin, class Taken, class Body>
  static void take_shares(int own, int shares, Begin&& begin, Taken&& taken, Body&& body) {
    for (int o = 0; o < shares; o++) {
      const int share = (own + o) % shares;
      const int64_t first = begin(share), count = begin(share + 1) - first;
      std::atomic<int64_t>& next = taken(share);
      if (o > 0 && next.load(std::memory_order_relaxed) >= count) continue;  // leaves the line to the other threads
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(first + i);
    }
  }

  // Steps and their kinds, in the order in which they run.
  struct StepList {
    std::vector<const ckdist_step*> steps;
    std::vector<const StepKind*> kinds;
    std::vector<int> next_ahead;  // for each step: index of the next step that reads ahead, or -1
    int number = 0;
    StepList(const ckdist_step_list& list, int number);
  };
  // Before the first run: reads the lists of all plans, and allocates the threads' memory and the workspace.
  void make_lists();
  // Runs steps [0, count) of the list on one thread. `by_kind`: the first thread adds up the seconds of each kind.
  void walk(int thread, int count, bool by_kind = false);

  struct alignas(64) Thread {
    Ahead ahead;
    TraceLane* lane = nullptr;
    alignas(64) std::atomic<int64_t> taken{0};  // items of `parallel_for` that are begun
  };
  std::shared_ptr<Pool> pool_;
  std::vector<Thread> threads_;
  std::optional<Arena> arena_;
  std::vector<StepList> lists_;     // of all plans, in order
  const StepList* list_ = nullptr;  // the list that runs
  int active_ = 1;
  ckdist_step_stats stats_{};
  std::array<double, ckdist_step_kinds> seconds_{};

 private:
  void find_ahead(int thread, int index) {
    Ahead& ahead = threads_[thread].ahead;
    const int next = list_->next_ahead[index];
    if (ahead.step == next) return;
    ahead = {next, nullptr, nullptr};
    if (next >= 0) list_->kinds[next]->ahead(*this, thread, *list_->steps[next], ahead);
  }
  static void fetch_ahead(void* ahead);

  int64_t memory_bytes_ = 0, workspace_bytes_ = 0;
  std::optional<Arena> memory_, workspace_;
};

// The active threads of a step as the team of a collective.
class StepTeam final : public Team {
 public:
  StepTeam(Executor& executor, int thread, int index)
      : Team(thread, executor.active()), executor_(executor), index_(index) {}

 private:
  void run_last(void (*last)(void*), void* of) override {
    executor_.meet(thread, index_, true, [&](Idle) { last(of); });
  }
  Executor& executor_;
  const int index_;
};

}  // namespace ckdist
