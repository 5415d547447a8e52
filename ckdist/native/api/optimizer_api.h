#pragma once
#include "api/export.h"
#include "api/pool_api.h"

struct ckdist_optimizer;

/* Updates parameters with a pool's threads. `isa` names the kernels; null: those chosen at load. */
CKDIST_EXPORT int ckdist_optimizer_new(const char* isa, struct ckdist_pool* pool, struct ckdist_optimizer** out);
CKDIST_EXPORT void ckdist_optimizer_free(struct ckdist_optimizer* optimizer);

/* Sum of x[i]^2 in double, in an order that depends only on n. Not finite if any x is not. */
CKDIST_EXPORT int ckdist_optimizer_sum_squares(struct ckdist_optimizer* optimizer, const float* x, int64_t n,
                                               double* out);

/* The place of an element in its whole weight, which random rounding depends on: so it does not depend on ranks. The
   part begins with element `first` of a shard of matrices of rows x columns. The row `first_row` and the column
   `first_column` of the whole weight, whose matrices have `whole_rows`, are the shard's first ones. */
struct ckdist_rounding {
  uint32_t key; /* of the weight and the seed */
  int64_t first, rows, columns, whole_rows, first_row, first_column;
};

/* Part i of the n parameters is [ends[i - 1], ends[i]); the last end is n. It has weight decay if decays[i] is not
   0. Gradients are already multiplied by `gradient_scale`. `step` counts from 1. */
struct ckdist_update {
  const int64_t* ends;
  const uint8_t* decays;
  int64_t parts, n, step;
  double gradient_scale, learning_rate, weight_decay;
  float* parameters;
  const float* gradients;
  /* If this is not null, it has the parameters as bfloat16. New values are rounded at random, to the next value below
     or above, so that the mean of the rounded values is the exact one. rounding: (parts,) */
  uint16_t* narrow;
  const struct ckdist_rounding* rounding;
};
/* narrow = values, rounded so. An update of one part. */
CKDIST_EXPORT int ckdist_optimizer_round(struct ckdist_optimizer* optimizer, const struct ckdist_update* update,
                                         const float* values);
CKDIST_EXPORT int ckdist_optimizer_adamw(struct ckdist_optimizer* optimizer, const struct ckdist_update* update,
                                         double beta1, double beta2, double eps, float* mean, float* square);
/* The same for one parameter whose moments have codes of 8 bits, one scale for each 256 of them. */
CKDIST_EXPORT int ckdist_optimizer_adamw_8bit(struct ckdist_optimizer* optimizer, const struct ckdist_update* update,
                                              double beta1, double beta2, double eps, uint8_t* mean, float* mean_scales,
                                              uint8_t* square, float* square_scales);
/* One parameter: `matrices` matrices of rows x columns, or a vector if column_means is null. row_means: (matrices,
   rows), or the mean squares of a vector. column_means: (matrices, columns). */
CKDIST_EXPORT int ckdist_optimizer_adafactor(struct ckdist_optimizer* optimizer, const struct ckdist_update* update,
                                             int64_t matrices, int64_t rows, double beta, float* row_means,
                                             float* column_means);
CKDIST_EXPORT int ckdist_optimizer_sgd(struct ckdist_optimizer* optimizer, const struct ckdist_update* update,
                                       double momentum, float* velocity);
