// Row-wise kernels. The order of a sum depends only on the row's length: four Vecs of partial sums, then one tree.
#include "kernels/elementwise.h"

#include "kernels/isa/activations.h"
#include "kernels/isa/gate.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kStreams = 4;  // independent partial results, to hide the latency of an addition

int lanes_left(int64_t n, int64_t i) { return static_cast<int>(n - i < kLanes ? n - i : kLanes); }

// Calls body(i, lanes) for every Vec of a row. `lanes` is 16, except for the last.
template <class Body>
CKDIST_INLINE void each(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; n - i >= kLanes; i += kLanes) body(i, kLanes);
  if (i < n) body(i, lanes_left(n, i));
}

CKDIST_INLINE Vec load_lanes(const float* p, int lanes) { return lanes == kLanes ? load(p) : load_n(p, lanes); }
CKDIST_INLINE void store_lanes(float* p, Vec a, int lanes) { lanes == kLanes ? store(p, a) : store_n(p, a, lanes); }

float sum_squares(const float* x, int64_t n) {
  Vec squares[kStreams] = {set(0), set(0), set(0), set(0)};
  int64_t i = 0;
  for (; n - i >= kStreams * kLanes; i += kStreams * kLanes) {
    for (int s = 0; s < kStreams; ++s) {
      const Vec a = load(x + i + s * kLanes);
      squares[s] = fma(a, a, squares[s]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vec a = load_lanes(x + i, lanes_left(n, i));
    squares[0] = fma(a, a, squares[0]);
  }
  return reduce_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
}

void scale_weighted(const float* x, float factor, const float* weight, int64_t n, float* out) {
  const Vec by = set(factor);
  each(n, [&](int64_t at, int lanes) {
    store_lanes(out + at, load_lanes(x + at, lanes) * by * load_lanes(weight + at, lanes), lanes);
  });
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  scale_weighted(x, 1.0f / __builtin_sqrtf(sum_squares(x, n) / static_cast<float>(n) + eps), weight, n, out);
}

float sum(const float* x, int64_t n) {
  Vec parts[kStreams] = {set(0), set(0), set(0), set(0)};
  int64_t i = 0;
  for (; n - i >= kStreams * kLanes; i += kStreams * kLanes)
    for (int s = 0; s < kStreams; ++s) parts[s] = parts[s] + load(x + i + s * kLanes);
  for (; i < n; i += kLanes) parts[0] = parts[0] + load_lanes(x + i, lanes_left(n, i));
  return reduce_sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
  const Vec mean = set(sum(x, n) / static_cast<float>(n));
  each(n, [&](int64_t i, int lanes) { store_lanes(out + i, load_lanes(x + i, lanes) - mean, lanes); });
  rms_norm(out, weight, eps, n, out);
  if (bias)
    each(n, [&](int64_t i, int lanes) {
      store_lanes(out + i, load_lanes(out + i, lanes) + load_lanes(bias + i, lanes), lanes);
    });
}

void sum_parts(const float* x, const float* const* parts, int count, int64_t n, float* out) {
  const float* first = x ? x : parts[0];
  const int from = x ? 0 : 1;
  each(n, [&](int64_t i, int lanes) {
    Vec sum = load_lanes(first + i, lanes);
    for (int p = from; p < count; ++p) sum = sum + load_lanes(parts[p] + i, lanes);
    store_lanes(out + i, sum, lanes);
  });
}

void rope_pairs(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    out[2 * i + 1] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

void rope(const float* x, const float* cos, const float* sin, int64_t n, float* out) {
  const int64_t half = n / 2;
  each(half, [&](int64_t i, int lanes) {
    const Vec a = load_lanes(x + i, lanes), b = load_lanes(x + half + i, lanes);
    const Vec c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(out + i, fnma(b, s, a * c), lanes);
    store_lanes(out + half + i, fma(a, s, b * c), lanes);
  });
}

// Calls body(f), where f computes `function`. A call for every vector would take longer than the function.
template <class Body>
CKDIST_INLINE void with_function(GateFunction function, Body&& body) {
  if (function == GateFunction::silu) body([](Vec x) CKDIST_INLINED { return silu(x); });
  else if (function == GateFunction::sigmoid) body([](Vec x) CKDIST_INLINED { return sigmoid(x); });
  else if (function == GateFunction::gelu) body([](Vec x) CKDIST_INLINED { return gelu(x); });
  else if (function == GateFunction::tanh) body([](Vec x) CKDIST_INLINED { return tanh(x); });
  else if (function == GateFunction::relu) body([](Vec x) CKDIST_INLINED { return max(x, set(0.0f)); });
  else if (function == GateFunction::relu2)
    body([](Vec x) CKDIST_INLINED {
      const Vec y = max(x, set(0.0f));
      return y * y;
    });
  else if (function == GateFunction::softplus) body([](Vec x) CKDIST_INLINED { return softplus(x); });
  else body([](Vec x) CKDIST_INLINED { return gelu_tanh(x); });
}

void gated(GateFunction function, const float* gate, const float* up, int64_t n, float* out) {
  if (function == GateFunction::clamped_swiglu)
    return each(n, [&](int64_t i, int lanes) {
      store_lanes(out + i, clamped_swiglu(load_lanes(gate + i, lanes), load_lanes(up + i, lanes)), lanes);
    });
  if (function == GateFunction::clamped_silu)
    return each(n, [&](int64_t i, int lanes) {
      store_lanes(out + i, clamped_silu(load_lanes(gate + i, lanes), load_lanes(up + i, lanes)), lanes);
    });
  if (function == GateFunction::situ)
    return each(n, [&](int64_t i, int lanes) {
      store_lanes(out + i, situ(load_lanes(gate + i, lanes), load_lanes(up + i, lanes)), lanes);
    });
  if (const int code = static_cast<int>(function); GateFunction(code & 255) == GateFunction::limited_silu) {
    const Vec limit = set(static_cast<float>(code >> 8) / 16);
    return each(n, [&](int64_t i, int lanes) {
      store_lanes(out + i, limited_silu(load_lanes(gate + i, lanes), load_lanes(up + i, lanes), limit), lanes);
    });
  }
  with_function(function, [&](auto f) {
    each(n, [&](int64_t i, int lanes) CKDIST_INLINED {
      store_lanes(out + i, f(load_lanes(gate + i, lanes)) * load_lanes(up + i, lanes), lanes);
    });
  });
}

void activate(GateFunction function, float* x, int64_t n) {
  with_function(function, [&](auto f) {
    each(n, [&](int64_t i, int lanes) CKDIST_INLINED { store_lanes(x + i, f(load_lanes(x + i, lanes)), lanes); });
  });
}

void soft_cap(float* x, float cap, int64_t n) {
  each(n,
       [&](int64_t i, int lanes) { store_lanes(x + i, set(cap) * tanh(load_lanes(x + i, lanes) / set(cap)), lanes); });
}

void add_scaled(const float* x, float factor, int64_t n, float* out) {
  each(n, [&](int64_t i, int lanes) {
    store_lanes(out + i, fma(load_lanes(x + i, lanes), set(factor), load_lanes(out + i, lanes)), lanes);
  });
}

void add(const float* x, int64_t n, float* out) {
  each(n, [&](int64_t i, int lanes) {
    store_lanes(out + i, load_lanes(out + i, lanes) + load_lanes(x + i, lanes), lanes);
  });
}

// take(i, lanes, probe): returns the Vec at i for the maximum. It adds the numbers that must be finite to `probe`.
template <class Take>
CKDIST_INLINE bool maxima_of(int64_t n, float* out, Take&& take) {
  Vec probe[kStreams] = {set(0), set(0), set(0), set(0)};  // 0 x is NaN for NaN and infinities, and a sum keeps it
  for (int64_t start = 0; start < n; start += kMaxSpan, out += kLanes) {
    const int64_t end = n - start < kMaxSpan ? n : start + kMaxSpan;
    Vec largest[kStreams];
    for (int s = 0; s < kStreams; ++s) largest[s] = set(-__builtin_inff());
    int64_t i = start;
    for (; end - i >= kStreams * kLanes; i += kStreams * kLanes)
      for (int s = 0; s < kStreams; ++s) largest[s] = max(largest[s], take(i + s * kLanes, kLanes, probe[s]));
    for (; i < end; i += kLanes) {
      const int lanes = lanes_left(end, i);
      largest[0] = max(largest[0], select(lanes_of((1u << lanes) - 1), take(i, lanes, probe[0]), largest[0]));
    }
    store(out, max(max(largest[0], largest[1]), max(largest[2], largest[3])));
  }
  return reduce_sum((probe[0] + probe[1]) + (probe[2] + probe[3])) == 0.0f;
}

bool maxima(const float* x, int64_t n, float* out) {
  return maxima_of(n, out, [&](int64_t i, int lanes, Vec& probe) {
    const Vec a = load_lanes(x + i, lanes);
    probe = fma(a, set(0.0f), probe);
    return a;
  });
}

bool maxima_allowed(const float* x, const uint32_t* allowed, float removed, int64_t n, float* kept, float* out) {
  return maxima_of(n, out, [&](int64_t i, int lanes, Vec& probe) {
    const Vec a = load_lanes(x + i, lanes);
    probe = fma(a, set(0.0f), probe);
    const Vec b = select(lanes_of(allowed[i / 32] >> i % 32 & 0xffff), a, set(removed));
    store_lanes(kept + i, b, lanes);
    return b;
  });
}

// Sums of floats over spans of 1024, and of doubles over the spans, so that the error does not grow with the
// vocabulary.
double sum_exp(const float* x, int64_t n, float shift, float scale, float* out) {
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kMaxSpan) {
    const int64_t length = n - start < kMaxSpan ? n - start : kMaxSpan;
    Vec sum = set(0.0f);
    each(length, [&](int64_t i, int lanes) {
      const Vec term = exp((load_lanes(x + start + i, lanes) - set(shift)) * set(scale));
      if (out) store_lanes(out + start + i, term, lanes);
      if (lanes == kLanes) {
        sum = sum + term;
      } else {  // absent lanes hold other values
        float present[kLanes] = {};
        store_n(present, term, lanes);
        sum = sum + load(present);
      }
    });
    total += reduce_sum(sum);
  }
  return total;
}

double sum_at_least(const float* x, const float* terms, int64_t n, float threshold) {
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kMaxSpan) {
    const int64_t length = n - start < kMaxSpan ? n - start : kMaxSpan;
    Vec sum = set(0.0f);
    each(length, [&](int64_t i, int lanes) {  // absent lanes have terms of 0
      const Vec term = load_lanes(terms + start + i, lanes);
      sum = sum + select(less(load_lanes(x + start + i, lanes), set(threshold)), set(0.0f), term);
    });
    total += reduce_sum(sum);
  }
  return total;
}

}  // namespace

extern const ElementwiseKernel elementwise_kernel = {rms_norm,
                                                     sum_parts,
                                                     rope,
                                                     rope_pairs,
                                                     sum_squares,
                                                     scale_weighted,
                                                     gated,
                                                     activate,
                                                     layer_norm,
                                                     soft_cap,
                                                     prepare_activations,
                                                     prepare_in_strip,
                                                     add,
                                                     add_scaled,
                                                     maxima,
                                                     maxima_allowed,
                                                     sum_exp,
                                                     sum_at_least};

}  // namespace CKDIST_ISA
}  // namespace ckdist
