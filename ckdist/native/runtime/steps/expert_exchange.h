// Where hosts share rows out: a step's rows go to the hosts that have their experts, and what these make of them comes
// back.
#pragma once
#include "runtime/steps/routing.h"

namespace ckdist {

// Activations of a step's sets, so many of each, of which some or all may be the same; -1: a set has none.
constexpr int kExpertInputs = 3;
int expert_input(const ckdist_experts_step& step, int i);

// Rows that go to other hosts, and rows that come from them; nothing where hosts share no rows out.
struct ExpertExchange {
  RowExchange::Lists to, from;

  static ExpertExchange carve(Carver& c, const Inference& r, const ckdist_experts_step& step);
  // All threads make these calls.
  // Hosts tell one another which experts their rows take; then rows go to the hosts that have these.
  void dispatch(Team& team, Inference& r, const ckdist_experts_step& step, const Choice& choice, int index) const;
  // Adds what every host has made of a row, at the host whose row it is.
  void combine(Team& team, Inference& r, const ckdist_experts_step& step, int index) const;
};

}  // namespace ckdist
