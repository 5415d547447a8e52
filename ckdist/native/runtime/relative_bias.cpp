#include "runtime/relative_bias.h"

#include "api/steps_inference_api.h"
#include "runtime/executor.h"

namespace ckdist {

void read_biases(const ckdist_program& program, const ckdist_execution_plan& plan, RelativeBiases& biases) {
  for (int i = 0; i < plan.lists[0].count; i++) {
    const ckdist_step* const those = plan.lists[0].steps[i];
    const auto* const step = fields_of<ckdist_attend_step>(those, ckdist_step_attend);
    if (step == nullptr || step->relative < 0 || biases.count(plan.vectors[step->relative]) > 0) continue;
    const ckdist_layer& a = program.layers[step->layer];
    const float* const weights = plan.vectors[step->relative];  // (buckets, heads of all ranks)
    int heads = 0;
    for (int h = 0; h < a.kv_heads; h++) heads += a.heads_per_kv[h];
    RelativeBias& bias = biases[weights];
    bias.reach = step->reach;
    for (int head = 0; head < heads; head++)
      for (int d = 0; d <= 2 * step->reach; d++)
        bias.rows.push_back(weights[int64_t{step->buckets[d]} * a.total_heads + a.first_head + head]);
  }
}

}  // namespace ckdist
