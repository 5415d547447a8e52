// The load-balancing loss of experts and its gradient (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), over the
// tokens of all layers.
#include <algorithm>

#include "runtime/training.h"

namespace ckdist {
namespace {

struct BalanceLoss : TrainingRun<ckdist_balance_loss_step> {
  void run() {
    r.meet(thread, index, false, [&](Idle) {
      const int64_t experts = r.width(step.tally) / 2;
      // (experts,): times that each expert was chosen, and sums of its scores
      const float *const taken = r.floats(step.tally, 0), *const scores = taken + experts;
      float* const d = r.floats(step.d_tally, 0);
      const double rows = double(step.layers) * double(r.batch.tokens);
      const auto targets =
          double(std::count_if(r.batch.targets.begin(), r.batch.targets.end(), [](int32_t t) { return t >= 0; }));
      const double factor = targets * double(experts) / rows / rows;
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e) {
        sum += double(taken[e]) * double(scores[e]);
        d[e] = float(double(step.coefficient) * factor * double(scores[e]));
        d[experts + e] = float(double(step.coefficient) * factor * double(taken[e]));
      }
      r.balance = factor * sum;
    });
  }
};

const RegisteredKind<BalanceLoss> kKind(ckdist_step_balance_loss);

}  // namespace
}  // namespace ckdist
