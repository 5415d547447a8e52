#include "kernels/delta_rule.h"

#include "kernels/isa/gate.h"
#include "kernels/isa/lanes.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

void short_conv(const float* const* rows, const float* taps, int64_t stride, int tap_count, const float* bias,
                bool activates, int64_t n, float* out) {
  each(n, [&](int64_t c, int lanes) {
    Vec sum = load_lanes(taps + c, lanes) * load_lanes(rows[0] + c, lanes);
    for (int i = 1; i < tap_count; ++i)
      sum = fma(load_lanes(taps + i * stride + c, lanes), load_lanes(rows[i] + c, lanes), sum);
    if (bias) sum = sum + load_lanes(bias + c, lanes);
    store_lanes(out + c, activates ? silu(sum) : sum, lanes);
  });
}

float dot(const float* x, const float* y, int64_t n) {
  Vec sum = set(0.0f);
  each(n, [&](int64_t i, int lanes) { sum = fma(load_lanes(x + i, lanes), load_lanes(y + i, lanes), sum); });
  return reduce_sum(sum);
}

void l2_norm(const float* x, float eps, float scale, int64_t n, float* out) {
  const Vec by = set(scale / __builtin_sqrtf(dot(x, x, n) + eps));
  each(n, [&](int64_t i, int lanes) { store_lanes(out + i, load_lanes(x + i, lanes) * by, lanes); });
}

void decay_rows(const RowDecay& of, int64_t n) {
  const Vec rate = set(of.rate), floor = set(of.floor);
  each(n, [&](int64_t i, int lanes) {
    const Vec a = load_lanes(of.a + i, lanes) + load_lanes(of.bias + i, lanes);
    const Vec factor = exp(of.floor < 0.0f ? floor * sigmoid(rate * a) : set(0.0f) - rate * softplus(a));
    store_lanes(of.factor + i, factor, lanes);
    store_lanes(of.decayed_q + i, load_lanes(of.q + i, lanes) * factor, lanes);
    store_lanes(of.decayed_k + i, load_lanes(of.k + i, lanes) * factor, lanes);
  });
}

#if defined(__AVX512F__)
constexpr int kWide = 2;  // Vecs of columns at a time, limited by the registers
#else
constexpr int kWide = 1;
#endif
constexpr int kChains = 2;  // sums of even and of odd rows

// Sums of a token over kWide Vecs of columns of the state before it.
struct Sums {
  Vec k[kChains][kWide], q[kChains][kWide];
};
CKDIST_INLINE void clear(Sums& s) {
  for (int c = 0; c < kChains; ++c)
    for (int w = 0; w < kWide; ++w) s.k[c][w] = s.q[c][w] = set(0.0f);
}

// One pass over the state. `updates`: updates it with one token's key and values. `asks`: computes the products of the
// state with the next token's query and, if it `corrects`, with its key. `by_row`: each row of the state has its own
// factor.
template <bool by_row, bool updates, bool asks, bool corrects>
CKDIST_INLINE void pass(float* state, int key_width, const float* decay, const float* key, const Vec* taken,
                        const float* next_key, const float* next_query, Sums& sums) {
  const Vec one = set(updates && !by_row ? *decay : 1.0f);
  if constexpr (asks) clear(sums);
  const auto row = [&](int r, int chain) __attribute__((always_inline)) {
    const Vec by = updates && by_row ? set(decay[r]) : one;
    for (int w = 0; w < kWide; ++w) {
      float* const at = state + r * kStateColumns + w * kLanes;
      Vec s = load(at);
      if constexpr (updates) s = fma(set(key[r]), taken[w], by * s), store(at, s);
      if constexpr (asks) {
        if constexpr (corrects) sums.k[chain][w] = fma(set(next_key[r]), s, sums.k[chain][w]);
        sums.q[chain][w] = fma(set(next_query[r]), s, sums.q[chain][w]);
      }
    }
  };
  int r = 0;
  for (; r + kChains <= key_width; r += kChains)
    for (int c = 0; c < kChains; ++c) row(r + c, c);
  for (int c = 0; r + c < key_width; ++c) row(r + c, c);
}

// With a factor per row the products are those of the decayed state: q and k have the factors.
template <bool by_row, bool corrects>
void update_state(const DeltaTokens& tokens, int key_width, int columns, float* state) {
  constexpr int kPiece = 64;
  float reads[kPiece];  // q . k of each token
  const int64_t factors = by_row ? key_width : 1;
  for (int first = 0; first < tokens.count; first += kPiece) {
    const int end = first + kPiece < tokens.count ? first + kPiece : tokens.count;
    for (int t = first; t < end; ++t)
      reads[t - first] = dot(tokens.q + int64_t{t} * key_width, tokens.k + int64_t{t} * key_width, key_width);
    for (int column = 0; column < columns; column += kWide * kLanes) {
      float* const part = state + int64_t{column / kStateColumns} * key_width * kStateColumns + column % kStateColumns;
      Sums sums;
      const float* key = tokens.k + int64_t{first} * key_width;
      const float* asked_key = (by_row ? tokens.decayed_k : tokens.k) + int64_t{first} * key_width;
      const float* asked_query = (by_row ? tokens.decayed_q : tokens.q) + int64_t{first} * key_width;
      pass<by_row, false, true, corrects>(part, key_width, nullptr, nullptr, nullptr, asked_key, asked_query, sums);
      for (int t = first; t < end; ++t, key += key_width) {
        const float* const factor = tokens.decay + t * factors;
        const Vec decay = set(by_row ? 1.0f : *factor), beta = set(tokens.beta[t]), read = set(reads[t - first]);
        Vec taken[kWide];
        for (int w = 0; w < kWide; ++w) {
          const int64_t at = int64_t{t} * columns + column + w * kLanes;
          Vec value = load(tokens.v + at);
          if constexpr (corrects) value = value - decay * (sums.k[0][w] + sums.k[1][w]);
          taken[w] = beta * value;
          store(tokens.out + at, fma(read, taken[w], decay * (sums.q[0][w] + sums.q[1][w])));
        }
        asked_key += key_width, asked_query += key_width;
        if (t + 1 < end)
          pass<by_row, true, true, corrects>(part, key_width, factor, key, taken, asked_key, asked_query, sums);
        else pass<by_row, true, false, corrects>(part, key_width, factor, key, taken, nullptr, nullptr, sums);
      }
    }
  }
}

void update(const DeltaTokens& tokens, int key_width, int columns, float* state) {
  if (tokens.decayed_k != nullptr) update_state<true, true>(tokens, key_width, columns, state);
  else if (tokens.corrects) update_state<false, true>(tokens, key_width, columns, state);
  else update_state<false, false>(tokens, key_width, columns, state);
}

void scan(const ScanToken& token, int rows, int64_t n, int64_t columns, float* state, float* out) {
  each(n, [&](int64_t i, int lanes) {
    const Vec x = load_lanes(token.x + i, lanes);
    const Vec d = softplus(load_lanes(token.dt + i, lanes) + load_lanes(token.dt_bias + i, lanes)), dx = d * x;
    Vec y = load_lanes(token.skip + i, lanes) * x;
    for (int r = 0; r < rows; ++r) {
      float* const at = state + r * columns + i;
      const Vec factor = exp(load_lanes(token.a + r * token.stride + i, lanes) * d);
      const Vec s = fma(factor, load_lanes(at, lanes), set(token.b[r]) * dx);
      store_lanes(at, s, lanes);
      y = fma(set(token.c[r]), s, y);
    }
    store_lanes(out + i, y * silu(load_lanes(token.z + i, lanes)), lanes);
  });
}

}  // namespace

extern const DeltaRuleKernel delta_rule_kernel = {short_conv, l2_norm, decay_rows, update, scan};

}  // namespace CKDIST_ISA
}  // namespace ckdist
