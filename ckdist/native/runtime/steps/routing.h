// The choice of experts for the rows of a step, and its rows grouped by expert.
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
    return {reinterpret_cast<ExpertRows*>(c.bytes(experts * int64_t{sizeof(ExpertRows)})),
            reinterpret_cast<int32_t*>(c.bytes(rows * step.routing.used * 4)), c.floats(rows * step.routing.used),
            reinterpret_cast<int32_t*>(c.bytes(experts * 4)), reinterpret_cast<int64_t*>(c.bytes(8))};
  }
  void make(const ckdist_experts_step& step, const Choice& choice, int64_t rows);
};

// Computes the scores of one row's logits. Both are (experts,).
void router_scores(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                   float* scores);
// Chooses the experts of one row by its logits, (experts,), or takes the `given` ones unless null. `room`: 2 * experts
// + 2 * groups floats. The definition is `route` in program/ops/experts.py.
void choose_experts(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                    const float* correction, const float* given, float* room, int32_t* chosen, float* shares);

}  // namespace ckdist
