// Softmax of training's attention and its gradient, row by row; what they make is written as the products that follow
// read it.
#pragma once
#include <cstdint>

#include "kernels/row.h"

namespace ckdist {

// Of one query: it sees the keys [first, last). A query that is not there sees none.
struct Query {
  int64_t first, last;
  float log_sum_exp;
  float delta;  // dot of the attention's result and its gradient
};

// Products q.k and do.v of `queries` queries (a multiple of 2) and `keys` keys (a multiple of 16), `stride` floats from
// a query to the next.
struct SoftmaxGradient {
  const float *products, *dp;
  int64_t stride, keys, queries;
  float scale, cap;  // cap: 0 for none
  bool narrow;       // results in bfloat16, else float32
  // By products with rows of keys: element [query][key] of ds, `ds_stride` bytes from a query to the next.
  uint8_t* ds;
  int64_t ds_stride;
  // By products that sum over queries: column `query` of row `key` of packed tiles (kernels/linear.h), `tile_bytes`
  // apart.
  uint8_t *p_transposed, *ds_transposed;
  int64_t tile_bytes;
};

struct SoftmaxKernel {
  // A row of n products q.k (n a multiple of 16), of which [first, last) are visible, becomes exp(s - largest s) with s
  // = cap(scale x) in `out`, zeros elsewhere; returns the log of the sum of exp(s). `inverse`: what makes the row a
  // softmax. cap: 0 for none. 0 <= first < last <= n; scale > 0.
  float (*row)(const float* x, int64_t n, int64_t first, int64_t last, float scale, float cap, float* inverse, Row out);
  // Of n of a row's logits x: the sum of e = exp(s - largest s) with s = cap(x). out = e cap', unless its place is
  // null, with zeros up to the next multiple of 16.
  float (*part)(const float* x, int64_t n, float cap, float* largest, Row out);
  // p = exp(s - lse), and ds, the gradient by the products: p (dp - delta) scale cap'; zeros where nothing is visible,
  // whatever stands there.
  void (*gradient)(const SoftmaxGradient& g, const Query* queries);
};

}  // namespace ckdist
