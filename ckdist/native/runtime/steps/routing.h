// The choice of experts for the rows of a step, its rows grouped by expert, and their exchange if rows are sharded over
// hosts: each row goes to the hosts that have its experts, and their results come back.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

// For each row: its experts, their shares, and the share of the set that all rows use.
struct Choice {
  float* rows;  // (rows, width(used)): experts, shares, the share of the shared set
  int used;

  static int64_t width(int used) { return 2 * used + 1; }
  int32_t* experts(int64_t row) const { return reinterpret_cast<int32_t*>(rows + row * width(used)); }
  float* shares(int64_t row) const { return rows + row * width(used) + used; }
  float& all(int64_t row) const { return rows[row * width(used) + 2 * used]; }

  static Choice carve(Carver& c, int64_t rows, int used) { return {c.floats(rows * width(used)), used}; }
};

// An expert with rows of the step, or the set that all rows use (set 1).
struct ExpertRows {
  int32_t set, expert;  // expert: index among this rank's experts of the set
  int64_t first, rows;  // first row of the group, number of rows
};

// The rows of a step grouped by expert.
struct Grouping {
  ExpertRows* groups;  // groups that have rows, in the order of experts
  int32_t* tokens;     // (rows * used,): for each grouped row its row in the step
  float* shares;       // (rows * used,): for each grouped row its share
  int32_t* starts;     // (experts + 1,)
  int64_t* count;      // number of groups

  static Grouping carve(Carver& c, int64_t rows, const ckdist_experts_step& step) {
    const int64_t experts = step.sets[0].count + 2;
    return {c.array<ExpertRows>(experts), c.array<int32_t>(rows * step.routing.used),
            c.floats(rows * step.routing.used), c.array<int32_t>(experts), c.array<int64_t>(1)};
  }
  void make(const ckdist_experts_step& step, const Choice& choice, int64_t rows);
};

// Activations that each set of experts of a step reads. Some or all may be the same; -1: not used.
constexpr int kExpertInputs = 3;
int expert_input(const ckdist_experts_step& step, int i);

// Rows to send to other hosts, and rows to receive from them. Empty if rows are not sharded over hosts.
struct ExpertExchange {
  RowExchange::Lists to, from;

  static ExpertExchange carve(Carver& c, const Inference& r, const ckdist_experts_step& step);
  // All threads make these calls. Gathers the choice of experts from all hosts. Then sends rows to the hosts that have
  // their experts.
  void dispatch(Team& team, Inference& r, const ckdist_experts_step& step, const Choice& choice, int index) const;
  // Adds every host's results of a row at the host that owns the row.
  void combine(Team& team, Inference& r, const ckdist_experts_step& step, int index) const;
};

// Computes the scores of one row's logits. Both are (experts,).
void router_scores(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                   float* scores);
// Chooses the experts of one row by its logits, (experts,), or takes the `given` ones unless null. `room`: 2 * experts
// + 2 * groups floats. The definition is `route` in program/ops/experts.py.
void choose_experts(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                    const float* correction, const float* given, float* room, int32_t* chosen, float* shares);

}  // namespace ckdist
