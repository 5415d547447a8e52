#include "api/optimizer_api.h"

#include <cmath>

#include "bindings/isa_choice.h"
#include "bindings/pool_handle.h"
#include "runtime/optimizer_pass.h"

using namespace ckdist;

struct ckdist_optimizer {
  Optimizer self;
};

namespace {

const ckdist_update& checked(const ckdist_update* u) {
  if (u->n < 0 || u->step < 1)
    fail(Status::config, "an update of %lld parameters in step %lld is not possible", (long long)u->n,
         (long long)u->step);
  int64_t last = 0;
  for (int64_t i = 0; i < u->parts; last = u->ends[i++])
    if (u->ends[i] < last)
      fail(Status::config, "part %lld ends at %lld, before it begins at %lld", (long long)i, (long long)u->ends[i],
           (long long)last);
  if (last != u->n)
    fail(Status::config, "the parts end at %lld, and there are %lld parameters", (long long)last, (long long)u->n);
  if (u->narrow && u->parts && !u->rounding) fail(Status::native, "an update of bfloat16 has no places for rounding");
  for (int64_t i = 0; u->narrow && i < u->parts; ++i)
    if (u->rounding[i].columns < 1 || u->rounding[i].rows < 1 || u->rounding[i].first < 0)
      fail(Status::native, "part %lld is in a matrix of %lld rows and %lld columns", (long long)i,
           (long long)u->rounding[i].rows, (long long)u->rounding[i].columns);
  return *u;
}

// Whether an update's only part has weight decay.
bool decayed(const ckdist_update* u) {
  if (checked(u).parts != 1) fail(Status::config, "an update of one parameter has %lld parts", (long long)u->parts);
  return u->decays[0] != 0;
}

AdamwNumbers numbers_of(const ckdist_update* u, double beta1, double beta2, double eps) {
  const double rate = u->learning_rate / (1 - std::pow(beta1, double(u->step))),
               root = 1 / std::sqrt(1 - std::pow(beta2, double(u->step)));
  return {float(u->gradient_scale),
          float(beta1),
          float(beta2),
          float(eps),
          float(rate),
          float(root),
          float(1 - u->learning_rate * u->weight_decay)};
}

}  // namespace

int ckdist_optimizer_new(const char* isa, struct ckdist_pool* pool, struct ckdist_optimizer** out) {
  return guard([&] { *out = new ckdist_optimizer{{kernels_by_name(isa), pool->pool}}; });
}

void ckdist_optimizer_free(struct ckdist_optimizer* optimizer) { delete optimizer; }

int ckdist_optimizer_sum_squares(struct ckdist_optimizer* optimizer, const float* x, int64_t n, double* out) {
  return guard([&] { *out = optimizer->self.sum_squares(x, n); });
}

int ckdist_optimizer_adamw(struct ckdist_optimizer* optimizer, const struct ckdist_update* u, double beta1,
                           double beta2, double eps, float* mean, float* square) {
  return guard([&] {
    const ckdist_update& update = checked(u);
    optimizer->self.adamw(numbers_of(u, beta1, beta2, eps), update, mean, square);
  });
}

int ckdist_optimizer_adamw_8bit(struct ckdist_optimizer* optimizer, const struct ckdist_update* u, double beta1,
                                double beta2, double eps, uint8_t* mean, float* mean_scales, uint8_t* square,
                                float* square_scales) {
  return guard([&] {
    AdamwNumbers numbers = numbers_of(u, beta1, beta2, eps);
    if (!decayed(u)) numbers.keep = 1;
    optimizer->self.adamw_8bit(numbers, *u, {mean, mean_scales}, {square, square_scales});
  });
}

int ckdist_optimizer_adafactor(struct ckdist_optimizer* optimizer, const struct ckdist_update* u, int64_t matrices,
                               int64_t rows, double beta, float* row_means, float* column_means) {
  return guard([&] {
    const double keep = decayed(u) ? 1 - u->learning_rate * u->weight_decay : 1;
    const AdafactorNumbers numbers = {u->gradient_scale, beta, u->learning_rate, keep};
    if (!column_means) return optimizer->self.adafactor(numbers, *u, row_means);
    if (matrices < 1 || rows < 1 || u->n % (matrices * rows))
      fail(Status::config, "%lld parameters are not %lld matrices of %lld rows", (long long)u->n, (long long)matrices,
           (long long)rows);
    const MatrixStack shape = {matrices, rows, u->n / (matrices * rows)};
    optimizer->self.adafactor(numbers, shape, *u, row_means, column_means);
  });
}

int ckdist_optimizer_sgd(struct ckdist_optimizer* optimizer, const struct ckdist_update* u, double momentum,
                         float* velocity) {
  return guard([&] {
    const ckdist_update& update = checked(u);
    const SgdNumbers numbers = {float(u->gradient_scale), float(momentum), float(u->learning_rate),
                                float(1 - u->learning_rate * u->weight_decay), u->step == 1};
    optimizer->self.sgd(numbers, update, velocity);
  });
}

int ckdist_optimizer_round(struct ckdist_optimizer* optimizer, const struct ckdist_update* u, const float* values) {
  return guard([&] {
    if (!u->narrow || checked(u).parts != 1) fail(Status::native, "this update has no single part to round");
    optimizer->self.parameters(*u).round(0, 0, u->n, values);
  });
}
