#include "runtime/steps/expert_exchange.h"

namespace ckdist {

namespace {

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

int expert_input(const ckdist_experts_step& step, int i) {
  const ckdist_expert_set& set = step.sets[i / kExpertInputs];
  return i % kExpertInputs == 0 ? set.gate_x : i % kExpertInputs == 1 ? set.up_x : set.low_x;
}

ExpertExchange ExpertExchange::carve(Carver& c, const Inference& r, const ckdist_experts_step& step) {
  if (step.step.rows != ckdist_rows_host) return {};
  const int hosts = r.ranks->host_count();
  const auto list = [&]() -> RowExchange::Lists {
    int32_t* const rows = reinterpret_cast<int32_t*>(c.bytes(RowExchange::most(r.program.max_tokens, hosts) * 4));
    return {rows, reinterpret_cast<int32_t*>(c.bytes((hosts + 1) * 4))};
  };
  const RowExchange::Lists to = list();
  return {to, list()};
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
