// The load-balancing loss of experts and its gradient (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), over the
// tokens of all layers. Chunks of tokens are summed by themselves, and then in order, so the bits do not depend on
// threads.
#include <algorithm>

#include "runtime/steps/routing.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

int64_t chunks(int64_t tokens) { return (tokens + Training::kSumRows - 1) / Training::kSumRows; }

struct BalanceLoss : TrainingRun<ckdist_balance_loss_step> {
  // Of each expert how often it is taken, and the sum of its scores.
  struct Sums {
    double *taken, *scores;
  };
  static int64_t experts_of(const Training& r, const Fields& step) { return r.width(step.layers[0].logits); }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return 8 * experts_of(r, step);
  }  // scores and gradients
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return 16 * chunks(r.program.max_tokens) * experts_of(r, step);
  }

  const int64_t experts = experts_of(r, step);
  float* const scores = reinterpret_cast<float*>(r.memory(thread));

  Sums sums(int64_t chunk) const {
    double* const at = reinterpret_cast<double*>(r.workspace()) + chunk * 2 * experts;
    return {at, at + experts};
  }
  const int32_t* chosen(const ckdist_balanced& layer, int64_t t) const {
    return reinterpret_cast<const int32_t*>(r.floats(layer.chosen, t));
  }
  void score(const ckdist_balanced& layer, int64_t t) const {
    router_scores(r.kernels, {0, ckdist_scores_softmax, 0, 1, 1, 1, 1.f}, r.floats(layer.logits, t), experts, scores);
  }

  void run() {
    const int64_t tokens = r.batch.tokens, count = chunks(tokens);
    parallel_for(count, [&](int64_t chunk) {
      sum(sums(chunk), chunk * Training::kSumRows, std::min<int64_t>((chunk + 1) * Training::kSumRows, tokens));
    });
    const double rows = double(step.count * tokens);
    const auto targets =
        double(std::count_if(r.batch.targets.begin(), r.batch.targets.end(), [](int32_t t) { return t >= 0; }));
    r.meet(thread, index, false, [&](Idle) {
      const Sums all = sums(0);
      for (int64_t chunk = 1; chunk < count; ++chunk)
        for (int64_t i = 0; i < 2 * experts; ++i) all.taken[i] += sums(chunk).taken[i];
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e) sum += all.taken[e] / rows * (all.scores[e] / rows);
      r.balance = targets * double(experts) * sum;
    });
    const double factor = double(step.coefficient) * targets * double(experts) / rows / rows;
    each_token([&](int64_t t) {
      for (int i = 0; i < step.count; ++i) token(step.layers[i], t, factor);
    });
  }

  void sum(const Sums& own, int64_t first, int64_t end) const {
    std::fill_n(own.taken, 2 * experts, 0.0);
    for (int i = 0; i < step.count; ++i)
      for (int64_t t = first; t < end; ++t) {
        score(step.layers[i], t);
        for (int64_t e = 0; e < experts; ++e) own.scores[e] += double(scores[e]);
        const int32_t* const of = chosen(step.layers[i], t);
        for (int64_t slot = 0; slot < r.width(step.layers[i].chosen); ++slot) own.taken[of[slot]] += 1;
      }
  }

  // Through the softmax of one token's logits.
  void token(const ckdist_balanced& layer, int64_t t, double factor) const {
    const double* const taken = sums(0).taken;
    score(layer, t);
    double mean = 0;
    for (int64_t e = 0; e < experts; ++e) mean += double(scores[e]) * taken[e];
    float* const d = scores + experts;
    for (int64_t e = 0; e < experts; ++e) d[e] = float(factor * double(scores[e]) * (taken[e] - mean));
    r.store(layer.d_logits, t, 0, d, experts);
  }
};

const RegisteredKind<BalanceLoss> kKind(ckdist_step_balance_loss);

}  // namespace
}  // namespace ckdist
