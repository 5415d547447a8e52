// Counts how often each expert was chosen, and sums its scores, over the tokens of some layers; and the gradients of
// their logits. Each chunk of tokens is summed separately, and chunks are added in order, so the bits do not depend on
// threads.
#include <algorithm>

#include "runtime/steps/routing.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

int64_t chunks(int64_t tokens) { return (tokens + Training::kSumRows - 1) / Training::kSumRows; }

// Writes the softmax of a token's logits, (experts,).
void score(const Training& r, int logits, int64_t t, int64_t experts, float* scores) {
  router_scores(r.kernels, {0, ckdist_scores_softmax, 0, 1, 1, 1, 1.f}, r.floats(logits, t), experts, scores);
}

struct Tally : TrainingRun<ckdist_tally_step> {
  static int64_t experts_of(const Training& r, const Fields& step) { return r.width(step.layers[0].logits); }
  static int64_t thread_bytes(const Training& r, const Fields& step) { return 4 * experts_of(r, step); }  // scores
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return 16 * chunks(r.program.max_tokens) * experts_of(r, step);
  }

  const int64_t experts = experts_of(r, step);
  float* const scores = reinterpret_cast<float*>(r.memory(thread));

  // (chunks, 2, experts): counts, sums of scores
  double* sums(int64_t chunk) const { return reinterpret_cast<double*>(r.workspace()) + chunk * 2 * experts; }

  void run() {
    const int64_t tokens = r.batch.tokens, count = chunks(tokens);
    parallel_for(count, [&](int64_t chunk) {
      sum(sums(chunk), chunk * Training::kSumRows, std::min<int64_t>((chunk + 1) * Training::kSumRows, tokens));
    });
    r.meet(thread, index, false, [&](Idle) {
      const float* const before = step.before < 0 ? nullptr : r.floats(step.before, 0);
      float* const out = r.floats(step.out, 0);  // (2, experts)
      for (int64_t i = 0; i < 2 * experts; ++i) {
        double total = before == nullptr ? 0 : double(before[i]);
        for (int64_t chunk = 0; chunk < count; ++chunk) total += sums(chunk)[i];
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
struct TallyGrad : TrainingRun<ckdist_tally_grad_step> {
  static int64_t experts_of(const Training& r, const Fields& step) { return r.width(step.layers[0].logits); }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return 8 * experts_of(r, step);
  }  // scores and gradients

  const int64_t experts = experts_of(r, step);
  float* const scores = reinterpret_cast<float*>(r.memory(thread));

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

const RegisteredKind<Tally> kTally(ckdist_step_tally);
const RegisteredKind<TallyGrad> kTallyGrad(ckdist_step_tally_grad);

}  // namespace
}  // namespace ckdist
