#include "kernels/state_gradient.h"

#include "kernels/isa/gate.h"
#include "kernels/isa/lanes.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kWide = kStateColumns / kLanes;  // Vecs of a row of a state

// Columns of one row, in registers.
struct Columns {
  Vec of[kWide];
};
CKDIST_INLINE Columns load_columns(const float* p) {
  Columns c;
  for (int w = 0; w < kWide; ++w) c.of[w] = load(p + w * kLanes);
  return c;
}
CKDIST_INLINE void store_columns(float* p, const Columns& c) {
  for (int w = 0; w < kWide; ++w) store(p + w * kLanes, c.of[w]);
}
CKDIST_INLINE Columns scaled(const Columns& c, Vec by) {
  Columns out;
  for (int w = 0; w < kWide; ++w) out.of[w] = c.of[w] * by;
  return out;
}
CKDIST_INLINE void add_scaled(Columns& to, Vec by, const Columns& c) {
  for (int w = 0; w < kWide; ++w) to.of[w] = fma(by, c.of[w], to.of[w]);
}
// Lanes whose sum is the product of two rows.
CKDIST_INLINE Vec product(const Columns& a, const Columns& b) {
  Vec sum = a.of[0] * b.of[0];
  for (int w = 1; w < kWide; ++w) sum = fma(a.of[w], b.of[w], sum);
  return sum;
}

// out[i] += the sum of the lanes of rows[i], for `count` of them. The other rows are zeros.
CKDIST_INLINE void add_sums(Vec (&rows)[kLanes], int count, float* out) {
  transpose(rows);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) rows[i] = rows[i] + rows[i + step];
  store_lanes(out, load_lanes(out, count) + rows[0], count);
}
// Calls row(i, place) for each row of a state, in groups of kLanes, and then end(first, count) for the group.
template <class Row, class End>
CKDIST_INLINE void each_group(int rows, Row&& row, End&& end) {
  for (int first = 0; first < rows; first += kLanes) {
    const int count = rows - first < kLanes ? rows - first : kLanes;
    for (int i = 0; i < count; ++i) row(first + i, i);
    end(first, count);
  }
}

template <bool by_row, bool corrects>
void advance_states(const StateTokens& of, float* states, float* taken) {
  const int n = of.key_width;
  for (int t = 0; t < of.count; ++t, states += int64_t{n} * kStateColumns) {
    const float *const k = of.k + int64_t{t} * n, *const decay = of.decay + int64_t{t} * (by_row ? n : 1);
    Columns value = load_columns(of.v + int64_t{t} * kStateColumns);
    if constexpr (corrects)
      for (int i = 0; i < n; ++i)
        add_scaled(value, set(-k[i] * decay[by_row ? i : 0]), load_columns(states + i * kStateColumns));
    store_columns(taken + int64_t{t} * kStateColumns, value);
    const Columns added = scaled(value, set(of.beta[t]));
    float* const next = states + int64_t{n} * kStateColumns;
    for (int i = 0; i < n; ++i) {
      Columns s = scaled(load_columns(states + i * kStateColumns), set(decay[by_row ? i : 0]));
      add_scaled(s, set(k[i]), added);
      store_columns(next + i * kStateColumns, s);
    }
  }
}

void advance(const StateTokens& of, float* states, float* taken) {
  if (of.by_row) advance_states<true, true>(of, states, taken);
  else if (of.corrects) advance_states<false, true>(of, states, taken);
  else advance_states<false, false>(of, states, taken);
}

// With S' = decay S, u = v - k S' (or v) and S2 = S' + k beta u, which the query reads:
//   dS2 += q d_out, dq = S2 d_out, d(beta u) = k dS2, du = beta d(beta u),
//   dk = dS2 (beta u) - S' du, dS' = dS2 - k du, d_decay = dS' S, dS = decay dS'.
template <bool by_row, bool corrects>
void back_states(const StateTokens& of, const float* states, const float* taken, const float* d_out, float* d_state,
                 const StateSums& sums, float* dv) {
  const int n = of.key_width;
  const int64_t size = int64_t{n} * kStateColumns;
  for (int t = of.count - 1; t >= 0; --t) {
    const float *const before = states + t * size, *const after = before + size;
    const float *const q = of.q + int64_t{t} * n, *const k = of.k + int64_t{t} * n;
    const float* const decay = of.decay + int64_t{t} * (by_row ? n : 1);
    const Columns d = load_columns(d_out + int64_t{t} * kStateColumns),
                  u = load_columns(taken + int64_t{t} * kStateColumns);
    const Vec beta = set(of.beta[t]);
    const Columns added = scaled(u, beta);
    Vec rows[kLanes], decays[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = decays[i] = set(0.0f);
    Columns d_added = scaled(d, set(0.0f));
    each_group(
        n,
        [&](int i, int place) {
          float* const at = d_state + i * kStateColumns;
          Columns own = load_columns(at);
          add_scaled(own, set(q[i]), d);
          store_columns(at, own);
          add_scaled(d_added, set(k[i]), own);
          rows[place] = product(load_columns(after + i * kStateColumns), d);
        },
        [&](int first, int count) {
          for (int i = count; i < kLanes; ++i) rows[i] = set(0.0f);
          add_sums(rows, count, sums.q + int64_t{t} * n + first);
        });
    sums.beta[t] += reduce_sum(product(d_added, u));
    const Columns du = scaled(d_added, beta);
    store_columns(dv + int64_t{t} * kStateColumns, du);
    Vec d_decay = set(0.0f);
    each_group(
        n,
        [&](int i, int place) {
          const Vec by = set(decay[by_row ? i : 0]);
          float* const at = d_state + i * kStateColumns;
          const Columns s = load_columns(before + i * kStateColumns);
          Columns own = load_columns(at);
          rows[place] = product(own, added);
          if constexpr (corrects) {
            rows[place] = rows[place] - by * product(s, du);
            add_scaled(own, set(-k[i]), du);
          }
          const Vec change = product(own, s);
          if constexpr (by_row) decays[place] = change;
          else d_decay = d_decay + change;
          store_columns(at, scaled(own, by));
        },
        [&](int first, int count) {
          for (int i = count; i < kLanes; ++i) rows[i] = decays[i] = set(0.0f);
          add_sums(rows, count, sums.k + int64_t{t} * n + first);
          if constexpr (by_row) add_sums(decays, count, sums.decay + int64_t{t} * n + first);
        });
    if constexpr (!by_row) sums.decay[t] += reduce_sum(d_decay);
  }
}

void back(const StateTokens& of, const float* states, const float* taken, const float* d_out, float* d_state,
          const StateSums& sums, float* dv) {
  if (of.by_row) back_states<true, true>(of, states, taken, d_out, d_state, sums, dv);
  else if (of.corrects) back_states<false, true>(of, states, taken, d_out, d_state, sums, dv);
  else back_states<false, false>(of, states, taken, d_out, d_state, sums, dv);
}

// y = scale x r with r = 1 / sqrt(sum x^2 + eps): dx = scale r (dy - x r^2 sum(x dy)).
void l2_norm(const float* x, const float* dy, float eps, float scale, int64_t n, float* dx) {
  Vec squares = set(0.0f), products = set(0.0f);
  each(n, [&](int64_t i, int lanes) {
    const Vec own = load_lanes(x + i, lanes);
    squares = fma(own, own, squares), products = fma(own, load_lanes(dy + i, lanes), products);
  });
  const float r = 1.0f / __builtin_sqrtf(reduce_sum(squares) + eps);
  const Vec by = set(scale * r), along = set(-r * r * reduce_sum(products));
  each(n, [&](int64_t i, int lanes) {
    store_lanes(dx + i, by * fma(along, load_lanes(x + i, lanes), load_lanes(dy + i, lanes)), lanes);
  });
}

void silu_grad(const float* x, const float* dy, int64_t n, float* out) {
  const Vec one = set(1.0f);
  each(n, [&](int64_t i, int lanes) {
    const Vec own = load_lanes(x + i, lanes), s = sigmoid(own);
    store_lanes(out + i, load_lanes(dy + i, lanes) * s * fma(own, one - s, one), lanes);
  });
}

void add_products(const float* x, const float* y, int64_t n, float* out) {
  each(n, [&](int64_t i, int lanes) {
    store_lanes(out + i, fma(load_lanes(x + i, lanes), load_lanes(y + i, lanes), load_lanes(out + i, lanes)), lanes);
  });
}

}  // namespace

extern const StateGradientKernel state_gradient_kernel = {advance, back, l2_norm, silu_grad, add_products};

}  // namespace CKDIST_ISA
}  // namespace ckdist
