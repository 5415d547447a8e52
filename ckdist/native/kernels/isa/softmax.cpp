#include "kernels/softmax.h"

#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

alignas(64) constexpr float kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// x if first <= i + lane < last, else `other`. x may be undefined there.
CKDIST_INLINE Vec visible(Vec x, int64_t i, int64_t first, int64_t last, float other = 0.0f) {
  if (first <= i && i + kLanes <= last) return x;
  const Vec lane = load(kNumbers), begin = set(static_cast<float>(first - i)), end = set(static_cast<float>(last - i));
  return select(less(lane, begin), set(other), select(less(lane, end), x, set(other)));
}

CKDIST_INLINE Vec capped(Vec x, float scale, float cap) { return set(cap) * tanh(x * set(scale / cap)); }

// The unit of x in exp(x): powers of two if the result is rounded to bfloat16.
template <bool narrow>
constexpr float kUnit = narrow ? 0x1.715476p0f : 1.0f;  // log2 e
template <bool narrow>
CKDIST_INLINE Vec power_of(Vec x) {
  if constexpr (narrow) return exp2_coarse(x);
  else return exp(x);
}

template <bool narrow>
CKDIST_INLINE void store_lanes(uint8_t* at, Vec a) {
  if constexpr (narrow) store_bf16(reinterpret_cast<uint16_t*>(at), a);
  else store(reinterpret_cast<float*>(at), a);
}

// Stores two columns of a tile.
template <bool narrow>
CKDIST_INLINE void store_columns(uint8_t* at, Vec a, Vec b) {
  if constexpr (narrow) store(reinterpret_cast<float*>(at), to_bf16_pairs(a, b));
  else store(reinterpret_cast<float*>(at), a), store(reinterpret_cast<float*>(at) + kLanes, b);
}

template <bool narrow, bool cap>
float row_of(const float* x, int64_t n, int64_t first, int64_t last, float factor, float limit, float* inverse,
             uint8_t* out) {
  const float scale = cap ? 1.0f : factor;
  const auto score = [&](int64_t i) { return cap ? capped(load(x + i), factor, limit) : load(x + i); };
  Vec most = set(-__builtin_inff());
  for (int64_t i = first / kLanes * kLanes; i < last; i += kLanes)
    most = max(visible(score(i), i, first, last, -__builtin_inff()), most);
  const float shift = scale * reduce_max(most);
  const Vec unit = set(scale * kUnit<narrow>);
  Vec total = set(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec p = visible(power_of<narrow>(fma(score(i), unit, set(-shift * kUnit<narrow>))), i, first, last);
    total = total + p;
    store_lanes<narrow>(out + i * (narrow ? 2 : 4), p);
  }
  const float sum = reduce_sum(total);
  *inverse = 1.0f / sum;
  return shift + __builtin_logf(sum);
}

float row(const float* x, int64_t n, int64_t first, int64_t last, float scale, float cap, float* inverse, Row out) {
  const auto of = out.narrow ? cap ? row_of<true, true> : row_of<true, false>
                  : cap      ? row_of<false, true>
                             : row_of<false, false>;
  return of(x, n, first, last, scale, cap, inverse, out.at);
}

CKDIST_INLINE Vec slope(Vec score, float cap) {
  const Vec ratio = score / set(cap);
  return fnma(ratio, ratio, set(1.0f));
}

template <bool narrow>
CKDIST_INLINE float part_of(const float* x, int64_t n, float cap, float* largest, uint8_t* out) {
  const auto score = [&](int64_t i) { return cap ? capped(load(x + i), 1.0f, cap) : load(x + i); };
  Vec most = set(-__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) most = max(visible(score(i), i, 0, n, -__builtin_inff()), most);
  *largest = reduce_max(most);
  const Vec unit = set(kUnit<narrow>), shift = set(-*largest * kUnit<narrow>);
  Vec total = set(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec s = score(i), e = visible(power_of<narrow>(fma(s, unit, shift)), i, 0, n);
    total = total + e;
    if (out) store_lanes<narrow>(out + i * (narrow ? 2 : 4), cap ? visible(e * slope(s, cap), i, 0, n) : e);
  }
  return reduce_sum(total);
}

float part(const float* x, int64_t n, float cap, float* largest, Row out) {
  return out.narrow ? part_of<true>(x, n, cap, largest, out.at) : part_of<false>(x, n, cap, largest, out.at);
}

template <bool narrow, bool cap>
void gradient_of(const SoftmaxGradient& given, const Query* queries) {
  const SoftmaxGradient g = given;
  constexpr int64_t element = narrow ? 2 : 4;
  for (int64_t q = 0; q < g.queries; q += 2) {
    const float *const x = g.products + q * g.stride, *const y = g.dp + q * g.stride;
    const Vec scale = set(g.scale), unit = set(cap ? kUnit<narrow> : g.scale * kUnit<narrow>);
    Vec shift[2], delta[2];
    for (int i = 0; i < 2; ++i)
      shift[i] = set(-queries[q + i].log_sum_exp * kUnit<narrow>), delta[i] = set(-queries[q + i].delta * g.scale);
    uint8_t *const rows = g.ds + q * g.ds_stride, *p_transposed = g.p_transposed + q * kLanes * element,
                   *ds_transposed = g.ds_transposed + q * kLanes * element;
    for (int64_t key = 0; key < g.keys; key += kLanes, p_transposed += g.tile_bytes, ds_transposed += g.tile_bytes) {
      Vec p[2], ds[2];
      for (int i = 0; i < 2; ++i) {
        const Vec product = load(x + i * g.stride + key);
        const Vec score = cap ? capped(product, g.scale, g.cap) : product;
        p[i] = power_of<narrow>(fma(score, unit, shift[i]));
        ds[i] = p[i] * fma(load(y + i * g.stride + key), scale, delta[i]);
        if (cap) ds[i] = ds[i] * slope(score, g.cap);
        p[i] = visible(p[i], key, queries[q + i].first, queries[q + i].last);
        ds[i] = visible(ds[i], key, queries[q + i].first, queries[q + i].last);
        store_lanes<narrow>(rows + i * g.ds_stride + key * element, ds[i]);
      }
      store_columns<narrow>(p_transposed, p[0], p[1]);
      store_columns<narrow>(ds_transposed, ds[0], ds[1]);
    }
  }
}

void gradient(const SoftmaxGradient& g, const Query* queries) {
  const auto of = g.narrow ? g.cap ? gradient_of<true, true> : gradient_of<true, false>
                  : g.cap  ? gradient_of<false, true>
                           : gradient_of<false, false>;
  of(g, queries);
}

}  // namespace

extern const SoftmaxKernel softmax_kernel = {row, part, gradient};

}  // namespace CKDIST_ISA
}  // namespace ckdist
