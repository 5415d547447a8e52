#include "kernels/row.h"

#include "kernels/isa/gate.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

CKDIST_INLINE Vec load_row(Row row, int64_t i, int lanes) {
  const float* const floats = reinterpret_cast<const float*>(row.at) + i;
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(row.at) + i;
  if (lanes == kLanes) return row.narrow ? load_bf16(halves) : load(floats);
  if (!row.narrow) return load_n(floats, lanes);
  uint16_t some[kLanes] = {};
  for (int l = 0; l < lanes; ++l) some[l] = halves[l];
  return load_bf16(some);
}
CKDIST_INLINE void store_row(Row row, int64_t i, int lanes, Vec a) {
  float* const floats = reinterpret_cast<float*>(row.at) + i;
  uint16_t* const halves = reinterpret_cast<uint16_t*>(row.at) + i;
  if (lanes == kLanes) return row.narrow ? store_bf16(halves, a) : store(floats, a);
  if (!row.narrow) return store_n(floats, a, lanes);
  uint16_t some[kLanes];
  store_bf16(some, a);
  for (int l = 0; l < lanes; ++l) halves[l] = some[l];
}

// Calls body(i, lanes) for every Vec of a row. `lanes` is 16, except for the last.
template <class Body>
CKDIST_INLINE void each(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; n - i >= kLanes; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

void gated(GateFunction function, Row gate, Row up, int64_t n, Row out) {
  if (function == GateFunction::silu)
    each(n, [&](int64_t i, int lanes) {
      store_row(out, i, lanes, silu(load_row(gate, i, lanes)) * load_row(up, i, lanes));
    });
  else if (function == GateFunction::clamped_swiglu)
    each(n, [&](int64_t i, int lanes) {
      store_row(out, i, lanes, clamped_swiglu(load_row(gate, i, lanes), load_row(up, i, lanes)));
    });
  else if (function == GateFunction::sigmoid)
    each(n, [&](int64_t i, int lanes) {
      store_row(out, i, lanes, sigmoid(load_row(gate, i, lanes)) * load_row(up, i, lanes));
    });
  else if (function == GateFunction::softplus)
    each(n, [&](int64_t i, int lanes) {
      store_row(out, i, lanes, softplus(load_row(gate, i, lanes)) * load_row(up, i, lanes));
    });
  else if (function == GateFunction::identity || function == GateFunction::relu)
    each(n, [&](int64_t i, int lanes) {
      const Vec g = load_row(gate, i, lanes);
      const Vec f = function == GateFunction::relu ? max(g, set(0.0f)) : g;
      store_row(out, i, lanes, f * load_row(up, i, lanes));
    });
  else
    each(n, [&](int64_t i, int lanes) {
      store_row(out, i, lanes, gelu_tanh(load_row(gate, i, lanes)) * load_row(up, i, lanes));
    });
}

void gated_grad(GateFunction function, Row gate, Row up, Row dy, int64_t n, Row d_gate, Row d_up) {
  const Vec one = set(1.0f), half = set(0.5f);
  if (function == GateFunction::silu) {
    each(n, [&](int64_t i, int lanes) {
      const Vec g = load_row(gate, i, lanes), u = load_row(up, i, lanes), d = load_row(dy, i, lanes);
      const Vec sigmoid = one / (one + exp(set(0.0f) - g));
      store_row(d_gate, i, lanes, d * u * sigmoid * fma(g, one - sigmoid, one));
      store_row(d_up, i, lanes, d * g * sigmoid);
    });
    return;
  }
  if (function == GateFunction::clamped_swiglu) {
    const Vec limit = set(7.0f), alpha = set(1.702f), zero = set(0.0f);
    each(n, [&](int64_t i, int lanes) {
      const Vec gate_x = load_row(gate, i, lanes), up_x = load_row(up, i, lanes), d = load_row(dy, i, lanes);
      const Vec g = min(limit, gate_x), u = max(zero - limit, min(limit, up_x));
      const Vec sigmoid = one / (one + exp(zero - alpha * g));
      const Vec slope = sigmoid * fma(alpha * g, one - sigmoid, one);
      store_row(d_gate, i, lanes, select(less(limit, gate_x), zero, d * (u + one) * slope));
      store_row(d_up, i, lanes, select(less(limit, abs(up_x)), zero, d * g * sigmoid));
    });
    return;
  }
  if (function == GateFunction::identity || function == GateFunction::relu) {
    const Vec zero = set(0.0f);
    each(n, [&](int64_t i, int lanes) {
      const Vec g = load_row(gate, i, lanes), u = load_row(up, i, lanes), d = load_row(dy, i, lanes);
      const bool cuts = function == GateFunction::relu;
      store_row(d_gate, i, lanes, cuts ? select(less(zero, g), d * u, zero) : d * u);
      store_row(d_up, i, lanes, d * (cuts ? max(g, zero) : g));
    });
    return;
  }
  if (function == GateFunction::sigmoid || function == GateFunction::softplus) {
    const bool is_sigmoid = function == GateFunction::sigmoid;
    each(n, [&](int64_t i, int lanes) {
      const Vec g = load_row(gate, i, lanes), u = load_row(up, i, lanes), d = load_row(dy, i, lanes), s = sigmoid(g);
      store_row(d_gate, i, lanes, d * u * s * (is_sigmoid ? one - s : one));
      store_row(d_up, i, lanes, d * (is_sigmoid ? s : softplus(g)));
    });
    return;
  }
  const float scale = 0.79788456f, cubic = 0.044715f;
  each(n, [&](int64_t i, int lanes) {
    const Vec g = load_row(gate, i, lanes), u = load_row(up, i, lanes), d = load_row(dy, i, lanes), square = g * g;
    const Vec t = tanh(g * fma(square, set(cubic * scale), set(scale)));
    const Vec whole = half * (one + t);
    const Vec slope = fma(half * g * fnma(t, t, one), fma(square, set(3 * cubic * scale), set(scale)), whole);
    store_row(d_gate, i, lanes, d * u * slope);
    store_row(d_up, i, lanes, d * g * whole);
  });
}

// Rotates neighbours of the head at `at`.
void rope_pairs(Row x, const Rope& rope, bool back, int64_t at, Row out) {
  each(rope.dims, [&](int64_t i, int lanes) {
    float values[kLanes];
    store(values, load_row(x, at + i, lanes));
    for (int j = 0; j < lanes; j += 2) {
      const float a = values[j], b = values[j + 1], c = rope.cos[(i + j) / 2];
      const float s = back ? -rope.sin[(i + j) / 2] : rope.sin[(i + j) / 2];
      values[j] = __builtin_fmaf(-b, s, a * c);
      values[j + 1] = __builtin_fmaf(a, s, b * c);
    }
    store_row(out, at + i, lanes, load(values));
  });
}

void rope(Row x, const Rope& rope, bool back, int64_t head_dim, int64_t n, Row out) {
  const int64_t half = rope.dims / 2;
  for (int64_t at = 0; at < n && rope.interleaved; at += head_dim) rope_pairs(x, rope, back, at, out);
  if (!rope.interleaved) {
    each(half, [&](int64_t i, int lanes) {
      const Vec c = lanes == kLanes ? load(rope.cos + i) : load_n(rope.cos + i, lanes),
                angle = lanes == kLanes ? load(rope.sin + i) : load_n(rope.sin + i, lanes);
      const Vec s = back ? set(0.0f) - angle : angle;
      for (int64_t at = i; at < n; at += head_dim) {
        const Vec a = load_row(x, at, lanes), b = load_row(x, at + half, lanes);
        store_row(out, at, lanes, fnma(b, s, a * c));
        store_row(out, at + half, lanes, fma(a, s, b * c));
      }
    });
  }
  for (int64_t at = rope.dims; rope.dims < head_dim && at < n; at += head_dim)
    each(head_dim - rope.dims,
         [&](int64_t i, int lanes) { store_row(out, at + i, lanes, load_row(x, at + i, lanes)); });
}

float dot(Row x, Row y, int64_t n) {
  Vec sum = set(0.0f);
  each(n, [&](int64_t i, int lanes) { sum = fma(load_row(x, i, lanes), load_row(y, i, lanes), sum); });
  return reduce_sum(sum);
}

void scale(Row x, float factor, int64_t n, Row out) {
  each(n, [&](int64_t i, int lanes) { store_row(out, i, lanes, load_row(x, i, lanes) * set(factor)); });
}

}  // namespace

extern const RowKernel row_kernel = {gated, gated_grad, rope, dot, scale};

}  // namespace CKDIST_ISA
}  // namespace ckdist
