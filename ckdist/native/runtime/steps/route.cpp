// Training steps that choose experts, and their gradients. Rows are independent.
#include "runtime/scalars.h"
#include "runtime/steps/routing.h"
#include "runtime/training.h"

namespace ckdist {
namespace {

// Base of steps that read router logits. The thread's buffer is that of choose_experts().
template <class Fields>
struct RoutingRun : TrainingRun<Fields> {
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return 4 * (2 * r.width(step.logits) + 2 * step.routing.groups);
  }
};

struct Route : RoutingRun<ckdist_route_step> {
  void run() {
    const float* const correction = step.correction >= 0 ? r.parameter(step.correction) : nullptr;
    each_token([&](int64_t t) {
      choose_experts(r.kernels, step.routing, r.floats(step.logits, t), r.width(step.logits), correction, nullptr,
                     buffer(), reinterpret_cast<int32_t*>(r.floats(step.chosen, t)), r.floats(step.shares, t));
    });
  }
};

struct RouteGrad : RoutingRun<ckdist_route_grad_step> {
  void run() {
    each_token([&](int64_t t) { token(t); });
  }

  // Gradients from the shares, w = scale * s / sum(s) or w = scale * s, to the scores s, and from these to the logits.
  void token(int64_t t) {
    const int64_t experts = r.width(step.logits);
    const ckdist_routing& routing = step.routing;
    float *const scores = buffer(), *const d = scores + experts;  // (experts,): scores, their gradients
    const int32_t* const chosen = reinterpret_cast<const int32_t*>(r.floats(step.chosen, t));
    const float* const d_shares = r.floats(step.d_shares, t);
    router_scores(r.kernels, routing, r.floats(step.logits, t), experts, scores);
    float total = 1e-20f, inner = 0;
    for (int i = 0; i < routing.used; ++i) {
      total += scores[chosen[i]];
      inner += routing.scale * d_shares[i] * scores[chosen[i]];
    }
    std::fill_n(d, experts, 0.f);
    for (int i = 0; i < routing.used; ++i) {
      const float of = routing.scale * d_shares[i];
      d[chosen[i]] = routing.renormalise ? (of - inner / total) / total : of;
    }
    if (routing.scores == ckdist_scores_sigmoid) {
      for (int64_t e = 0; e < experts; ++e) d[e] *= scores[e] * (1 - scores[e]);
    } else {
      float mean = 0;
      for (int64_t e = 0; e < experts; ++e) mean += d[e] * scores[e];
      for (int64_t e = 0; e < experts; ++e) d[e] = scores[e] * (d[e] - mean);
    }
    r.store(step.d_logits, t, 0, d, experts);
  }
};

struct Switched : TokenRun<Switched, ckdist_switched_step> {
  void token(int64_t t) {
    r.kernels.row.scale(r.row(step.x, t), sigmoid(*r.read(step.by, t, row_buffer(0))), r.width(step.out),
                        r.row(step.out, t));
    r.pad(step.out, t);
  }
};

struct SwitchedGrad : TokenRun<SwitchedGrad, ckdist_switched_grad_step> {
  void token(int64_t t) {
    const float s = sigmoid(*r.read(step.by, t, row_buffer(0)));
    const float d = r.kernels.row.dot(r.row(step.dy, t), r.row(step.x, t), r.width(step.x)) * s * (1 - s);
    r.kernels.row.scale(r.row(step.dy, t), s, r.width(step.dx), r.row(step.dx, t));
    r.pad(step.dx, t);
    r.store(step.d_by, t, 0, &d, 1);
  }
};

const RegisteredKind<Route> kRoute(ckdist_step_route);
const RegisteredKind<RouteGrad> kRouteGrad(ckdist_step_route_grad);
const RegisteredKind<Switched> kSwitched(ckdist_step_switched);
const RegisteredKind<SwitchedGrad> kSwitchedGrad(ckdist_step_switched_grad);

}  // namespace
}  // namespace ckdist
