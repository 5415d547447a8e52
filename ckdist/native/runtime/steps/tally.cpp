// Counts how often each expert was chosen, and sums its scores, over the tokens of some layers; and the gradients of
// their logits. Each chunk of tokens is summed separately, and chunks are added in order, so the bits do not depend on
// threads. The load-balancing loss of experts reads these sums.
#include "runtime/steps/routing.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

// Writes the softmax of a token's logits, (experts,).
void score(const Training& r, int logits, int64_t t, int64_t experts, float* scores) {
  router_scores(r.kernels, {0, ckdist_scores_softmax, 0, 1, 1, 1, 1.f}, r.floats(logits, t), experts, scores);
}

template <class Fields>
struct TallyRun : TrainingRun<Fields> {
  static int64_t experts_of(const Training& r, const Fields& step) { return r.width(step.layers[0].logits); }
  // Scores of a token, and their gradients.
  static int64_t thread_bytes(const Training& r, const Fields& step) { return 8 * experts_of(r, step); }

  const int64_t experts = experts_of(this->r, this->step);
  float* const scores = this->buffer();
};

struct Tally : TallyRun<ckdist_tally_step> {
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return 16 * parts_of(r.program.max_tokens, Training::kSumRows) * experts_of(r, step);
  }

  // (chunks, 2, experts): counts, sums of scores
  double* sums(int64_t chunk) const { return reinterpret_cast<double*>(r.workspace()) + chunk * 2 * experts; }

  void run() {
    each_part(r.batch.tokens, Training::kSumRows,
              [&](int64_t first, int64_t end) { sum(sums(first / Training::kSumRows), first, end); });
    r.meet(thread, index, false, [&](Idle) {
      const float* const before = step.before < 0 ? nullptr : r.floats(step.before, 0);
      float* const out = r.floats(step.out, 0);  // (2, experts)
      for (int64_t i = 0; i < 2 * experts; ++i) {
        double total = before == nullptr ? 0 : double(before[i]);
        for (int64_t chunk = 0; chunk < parts_of(r.batch.tokens, Training::kSumRows); ++chunk) total += sums(chunk)[i];
        out[i] = float(total);
      }
    });
  }

  void sum(double* own, int64_t first, int64_t end) const {
    std::fill_n(own, 2 * experts, 0.0);
    for (int i = 0; i < step.count; ++i)
      for (int64_t t = first; t < end; ++t) {
        score(r, step.layers[i].logits, t, experts, scores);
        for (int64_t e = 0; e < experts; ++e) own[experts + e] += double(scores[e]);
        const auto* const chosen = reinterpret_cast<const int32_t*>(r.floats(step.layers[i].chosen, t));
        for (int64_t slot = 0; slot < r.width(step.layers[i].chosen); ++slot) own[chosen[slot]] += 1;
      }
  }
};

// Gradients only of the sums of scores: the counts do not depend smoothly on the logits.
struct TallyGrad : TallyRun<ckdist_tally_grad_step> {
  void run() {
    each_token([&](int64_t t) {
      for (int i = 0; i < step.count; ++i) token(step.layers[i], t);
    });
  }

  void token(const ckdist_tallied_grad& layer, int64_t t) const {
    const float* const d_scores = r.floats(step.d_tally, 0) + experts;
    score(r, layer.logits, t, experts, scores);
    double mean = 0;
    for (int64_t e = 0; e < experts; ++e) mean += double(scores[e]) * double(d_scores[e]);
    float* const d = scores + experts;
    for (int64_t e = 0; e < experts; ++e) d[e] = float(double(scores[e]) * (double(d_scores[e]) - mean));
    r.store(layer.d_logits, t, 0, d, experts);
  }
};

// The load-balancing loss of experts and its gradient (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), over the
// tokens of all layers.
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

const RegisteredKind<Tally> kTally(ckdist_step_tally);
const RegisteredKind<TallyGrad> kTallyGrad(ckdist_step_tally_grad);
const RegisteredKind<BalanceLoss> kBalanceLoss(ckdist_step_balance_loss);

}  // namespace
}  // namespace ckdist
