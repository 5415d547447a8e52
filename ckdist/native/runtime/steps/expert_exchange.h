// Exchange of rows if they are sharded over hosts: each row goes to the hosts that have its experts, and their results
// come back.
#pragma once
#include "runtime/steps/routing.h"

namespace ckdist {

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

}  // namespace ckdist
