// Which experts the rows of a step take, and its rows by expert.
#pragma once
#include "runtime/inference.h"

namespace ckdist {

// Of each row: `used` experts and their shares, and that of the set that all rows take.
struct Choice {
  float* rows;  // (rows, width(used)): experts, shares, the share of all
  int used;

  static int64_t width(int used) { return 2 * used + 1; }
  int32_t* experts(int64_t row) const { return reinterpret_cast<int32_t*>(rows + row * width(used)); }
  float* shares(int64_t row) const { return rows + row * width(used) + used; }
  float& all(int64_t row) const { return rows[row * width(used) + 2 * used]; }

  static Choice carve(Carver& c, int64_t rows, int used) { return {c.floats(rows * width(used)), used}; }
};

// An expert with rows of the step, or the set that all rows take.
struct ExpertRows {
  int32_t set, expert;  // among those of the set that are here
  int64_t first, rows;  // of its set's rows in the order of experts, and how many
};

// The rows of a step by expert.
struct Grouping {
  ExpertRows* groups;  // with rows, in the order of experts
  int32_t* tokens;     // (rows * used,): of the chosen set, the row of each of its rows
  float* shares;       // (rows * used,): likewise
  int32_t* starts;     // (experts + 1,)
  int64_t* count;      // of groups

  static Grouping carve(Carver& c, int64_t rows, const ckdist_experts_step& step) {
    const int64_t experts = step.sets[0].count + 2;
    Grouping g;
    g.groups = reinterpret_cast<ExpertRows*>(c.bytes(experts * int64_t{sizeof(ExpertRows)}));
    g.tokens = reinterpret_cast<int32_t*>(c.bytes(rows * step.routing.used * 4));
    g.shares = c.floats(rows * step.routing.used);
    g.starts = reinterpret_cast<int32_t*>(c.bytes(experts * 4));
    g.count = reinterpret_cast<int64_t*>(c.bytes(8));
    return g;
  }
  void make(const ckdist_experts_step& step, const Choice& choice, int64_t rows);
};

// The scores of one row's logits, (experts,).
void router_scores(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                   float* scores);
// Chooses the experts of one row by its logits, (experts,). `room`: so many floats, twice, and two for each group. The
// definition is `route` in program/ops/experts.py.
void choose_experts(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                    const float* correction, float* room, int32_t* chosen, float* shares);

}  // namespace ckdist
