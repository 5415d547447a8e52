#include "runtime/steps/routing.h"

#include <limits>

#include "kernels/half.h"
#include "runtime/scalars.h"

namespace ckdist {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Calls visit(index) for the `count` largest of n numbers; of equal numbers, the first. Sets visited numbers to kNever.
template <class Visit>
void each_largest(float* x, int64_t n, int count, Visit&& visit) {
  for (int i = 0; i < count; i++) {
    const int64_t best = std::max_element(x, x + n) - x;
    visit(best);
    x[best] = kNever;
  }
}

// Keeps the experts of the best groups. Sets the other experts to kNever.
void keep_best_groups(const ckdist_routing& routing, float* choice, int64_t experts, float* room) {
  const int64_t size = experts / routing.groups;
  constexpr int kMost = 8;  // maximum scores of a group that are summed
  float* const best = room;
  for (int g = 0; g < routing.groups; g++) {
    float top[kMost];
    const int count = int(std::min<int64_t>({routing.group_scores, kMost, size}));
    std::partial_sort_copy(choice + g * size, choice + (g + 1) * size, top, top + count, std::greater<float>());
    best[g] = 0.f;
    for (int i = 0; i < count; i++) best[g] += top[i];
  }
  float* const kept = room + routing.groups;
  std::fill(kept, kept + routing.groups, 0.f);
  each_largest(best, routing.groups, routing.top_groups, [&](int64_t g) { kept[g] = 1.f; });
  for (int g = 0; g < routing.groups; g++)
    if (kept[g] == 0.f) std::fill(choice + g * size, choice + (g + 1) * size, kNever);
}

bool first_use(const ckdist_experts_step& step, int i) {
  for (int before = 0; before < i; before++)
    if (expert_input(step, before) == expert_input(step, i)) return false;
  return true;
}

// True if a host has experts that a row uses. Every host has a part of the experts that all rows use.
bool takes(const ckdist_experts_step& step, const Choice& choice, int64_t row, int host) {
  const int32_t *const experts = choice.experts(row), *const held = step.host_experts + host;
  return step.count > 1 ||
         std::any_of(experts, experts + step.routing.used, [&](int32_t e) { return e >= held[0] && e < held[1]; });
}

// Lists for each host h the rows of host whose(h) that use an expert of host experts_of(h). No rows if whose(h) is
// negative.
template <class Whose, class ExpertsOf>
void list_rows(const Inference& r, const ckdist_experts_step& step, const Choice& choice,
               const RowExchange::Lists& lists, Whose&& whose, ExpertsOf&& experts_of) {
  int32_t count = 0;
  for (int h = 0; h < r.ranks->host_count(); h++) {
    lists.starts[h] = count;
    const int owner = whose(h);
    if (owner < 0) continue;
    const int64_t begin = r.host_rows->first(owner), end = begin + r.host_rows->count(owner);
    for (int64_t row = begin; row < end; row++)
      if (takes(step, choice, row, experts_of(h))) lists.rows[count++] = int32_t(row);
  }
  lists.starts[r.ranks->host_count()] = count;
}

}  // namespace

void router_scores(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                   float* scores) {
  const ElementwiseKernel& k = kernels.elementwise;
  if (routing.scores == ckdist_scores_sigmoid) {
    k.sum_exp(logits, experts, 0.f, -1.f, scores);
    for (int64_t e = 0; e < experts; e++) scores[e] = 1.f / (1.f + scores[e]);
  } else if (routing.scores == ckdist_scores_sqrt_softplus) {
    for (int64_t e = 0; e < experts; e++) scores[e] = std::sqrt(softplus(logits[e]));
  } else {
    const double sum = k.sum_exp(logits, experts, *std::max_element(logits, logits + experts), 1.f, scores);
    for (int64_t e = 0; e < experts; e++) scores[e] = float(scores[e] / sum);
  }
}

void choose_experts(const Kernels& kernels, const ckdist_routing& routing, const float* logits, int64_t experts,
                    const float* correction, const float* given, float* room, int32_t* chosen, float* shares) {
  float *const scores = room, *const choice = room + experts, *const groups = choice + experts;
  router_scores(kernels, routing, logits, experts, scores);
  for (int64_t e = 0; e < experts; e++) choice[e] = correction ? scores[e] + correction[e] : scores[e];
  for (int64_t e = 0; e < experts; e++)
    if (!(choice[e] > kNever)) choice[e] = std::numeric_limits<float>::lowest();  // NaN in a damaged file
  if (routing.groups > 1) keep_best_groups(routing, choice, experts, groups);
  float sum = 0.f;
  int slot = 0;
  const auto take = [&](int64_t e) {
    chosen[slot] = int32_t(e), shares[slot] = scores[e];
    sum += shares[slot++];
  };
  if (given == nullptr) each_largest(choice, experts, routing.used, take);
  else
    for (int i = 0; i < routing.used; i++)
      take(std::clamp<int64_t>(int32_t(bits_of_float(given[i])), 0, experts - 1));  // a damaged file may have any
  const float factor = routing.renormalise ? routing.scale / (sum + 1e-20f) : routing.scale;
  for (int i = 0; i < routing.used; i++) shares[i] *= factor;
}

void Grouping::make(const ckdist_experts_step& step, const Choice& choice, int64_t rows) {
  const ckdist_expert_set& set = step.sets[0];
  std::fill(starts, starts + set.count + 1, 0);
  const auto each_slot = [&](auto&& visit) {  // visit(row, slot, expert) if this rank has the expert
    for (int64_t row = 0; row < rows; row++)
      for (int slot = 0; slot < step.routing.used; slot++) {
        const int64_t e = choice.experts(row)[slot] - set.first;
        if (e >= 0 && e < set.count) visit(row, slot, e);
      }
  };
  each_slot([&](int64_t, int, int64_t e) { starts[e + 1]++; });
  int64_t n = 0;
  for (int32_t e = 0; e < set.count; e++) {
    if (starts[e + 1] > 0) groups[n++] = {0, e, starts[e], starts[e + 1]};
    starts[e + 1] += starts[e];
  }
  each_slot([&](int64_t row, int slot, int64_t e) {
    const int32_t at = starts[e]++;
    tokens[at] = int32_t(row), shares[at] = choice.shares(row)[slot];
  });
  if (step.count > 1) groups[n++] = {1, 0, 0, rows};
  *count = n;
}

int expert_input(const ckdist_experts_step& step, int i) {
  const ckdist_expert_set& set = step.sets[i / kExpertInputs];
  return i % kExpertInputs == 0 ? set.gate_x : i % kExpertInputs == 1 ? set.up_x : set.low_x;
}

ExpertExchange ExpertExchange::carve(Carver& c, const Inference& r, const ckdist_experts_step& step) {
  if (step.step.rows != ckdist_rows_host) return {};
  const int hosts = r.ranks->host_count();
  const int64_t rows = RowExchange::most(r.program.max_tokens, hosts);
  const RowExchange::Lists to{c.array<int32_t>(rows), c.array<int32_t>(hosts + 1)};
  return {to, {c.array<int32_t>(rows), c.array<int32_t>(hosts + 1)}};
}

void ExpertExchange::dispatch(Team& team, Inference& r, const ckdist_experts_step& step, const Choice& choice,
                              int index) const {
  RowExchange& hosts = *r.host_rows;
  hosts.all_gather(team, reinterpret_cast<uint8_t*>(choice.rows), Choice::width(step.routing.used) * 4, index);
  const int here = r.ranks->host();
  team.meet([&] {
    list_rows(r, step, choice, to, [&](int host) { return host == here ? -1 : here; }, [](int host) { return host; });
    list_rows(r, step, choice, from, [&](int host) { return host == here ? -1 : host; }, [&](int) { return here; });
  });
  for (int i = 0; i < kExpertInputs * step.count; i++)
    if (const int x = expert_input(step, i); x >= 0 && first_use(step, i))
      hosts.dispatch(team, to, from, r.step_activations(x), r.value(x).stride, index);
}

void ExpertExchange::combine(Team& team, Inference& r, const ckdist_experts_step& step, int index) const {
  const RowExchange::Partial in{r.floats(step.out).at, int(r.value(step.out).offset)};
  const FloatRows out = r.floats(r.value(step.out).sum);
  r.host_rows->combine(team, to, from, in, out.at, out.stride, index);
}

}  // namespace ckdist
