// Softmax of training's attention and its gradient, row by row. The results are in the formats of the following
// products.
#pragma once
#include <cstdint>

#include "kernels/row.h"

namespace ckdist {

// One query, which sees the keys [first, last). An absent query sees none.
struct Query {
  int64_t first, last;
  float log_sum_exp;
  float delta;  // dot product of the attention's result and its gradient
};

// Products q.k and do.v of `queries` queries (a multiple of 2) and `keys` keys (a multiple of 16). Queries are `stride`
// floats apart.
struct SoftmaxGradient {
  const float *products, *dp;
  int64_t stride, keys, queries;
  float scale, cap;  // cap: 0 for none
  bool narrow;       // results in bfloat16, else float32
  // For products with rows of keys: element [query][key] of ds. Queries are `ds_stride` bytes apart.
  uint8_t* ds;
  int64_t ds_stride;
  // For products that sum over queries: column `query` of row `key` of packed tiles (kernels/linear.h), which are
  // `tile_bytes` apart.
  uint8_t *p_transposed, *ds_transposed;
  int64_t tile_bytes;
};

struct SoftmaxKernel {
  // A row of n products q.k (n a multiple of 16); [first, last) are visible. out = exp(s - largest s) with s =
  // cap(scale x), and zeros elsewhere. Returns the log of the sum of exp(s). `inverse`: 1 / (sum of out). cap: 0 for
  // none. 0 <= first < last <= n; scale > 0.
  float (*row)(const float* x, int64_t n, int64_t first, int64_t last, float scale, float cap, float* inverse, Row out);
  // Over n logits x of a row: returns the sum of e = exp(s - largest s) with s = cap(x). out = e * cap'(x), unless it
  // is null, with zeros up to the next multiple of 16.
  float (*part)(const float* x, int64_t n, float cap, float* largest, Row out);
  // p = exp(s - lse), and ds = p (dp - delta) scale cap', the gradient with respect to the products. Zeros for
  // invisible keys, whose inputs may be undefined.
  void (*gradient)(const SoftmaxGradient& g, const Query* queries);
};

}  // namespace ckdist
